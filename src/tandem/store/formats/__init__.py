"""The layout of a store's bytes in memory and on disks: arithmetic, headers, checksums, buckets.

The page is docs/design/store/store_formats.md.
"""
