"""From files of records to examples in tokens."""
