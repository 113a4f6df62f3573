"""A store inside one process: put, get, a range, a batch. `tandem store` runs it for many hosts."""

from tandem.store import StoreClient

with StoreClient.local(segment_bytes=64 * 2**20) as store:
    print(store.put("greeting", b"hello, store"))  # PutResult.CREATED
    print(store.put("greeting", b"too late"))  # PutResult.EXISTS: the first value stays
    print(store.get("greeting"), store.get_range("greeting", 7, 5))
    store.put_many(["a", "b"], [b"1", b"2"])
    print(store.get_many(["a", "b", "c"]))  # the third is a NotFoundError
