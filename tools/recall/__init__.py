"""The recall micro-models: small models trained to answer questions about the document in their context."""
