"""Bodies of HTTP requests and answers as msgspec structs, without behaviour beyond decoding."""
