"""Pure: who holds which page, and which pages hold the KV of which tokens. Knows tokens, pages and leases only."""
