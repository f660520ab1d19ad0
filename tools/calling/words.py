"""The words that conversations about tools are made of. Each is one token."""

from tools.recall.tokenizer import names

# fmt: off
TOPICS = (
    "weather", "price", "traffic", "season", "distance", "humidity", "altitude", "postage", "exchange", "interest",
    "balance", "salary", "ranking", "score", "schedule", "departure", "arrival", "menu", "recipe", "calorie",
    "translation", "synonym", "pronunciation", "population", "currency", "anthem", "climate", "tide", "sunrise",
    "sunset", "moonphase", "pollen", "pollution", "earthquake", "forecast", "inventory", "warranty", "discount",
    "shipping", "invoice", "refund", "payment", "mortgage", "insurance", "vacancy", "rent", "deposit", "booking",
)
# fmt: on
"""What a user asks about. A tool's description is the topic that it knows."""
# fmt: off
FUNCTIONS = (
    "get_data", "find_item", "run_query", "fetch_page", "read_sheet", "ask_server", "open_record", "list_rows",
    "load_entry", "scan_table", "show_value", "check_log", "pull_report", "call_api", "trace_key", "count_parts",
    "match_line", "probe_node", "query_store", "seek_index", "watch_feed", "pick_card", "grab_sample", "visit_site",
)
# fmt: on
"""Names of functions; they tell nothing of what a function knows."""
# fmt: off
ARGUMENTS = {
    "string": (
        "city", "country", "region", "street", "company", "product", "person", "language", "zone", "model", "brand",
        "color",
    ),
    "integer": (
        "year", "month", "hours", "level", "limit", "size", "weight", "depth", "height", "width", "angle", "volume",
    ),
}
# fmt: on
"""Type |-> names of arguments that have it."""
WORDS = names()[len(TOPICS) + len(FUNCTIONS) :]
"""Values that are words."""
NUMBERS = tuple(str(number) for number in range(10, 100))
"""Values that are numbers."""
