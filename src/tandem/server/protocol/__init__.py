"""Bodies of requests and responses, as msgspec structs; no behaviour beyond decoding."""
