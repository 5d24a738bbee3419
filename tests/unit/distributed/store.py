"""`python -m tests.unit.distributed.store`: a store of torch.distributed. Prints its port."""

import time

import torch.distributed as dist

if __name__ == "__main__":
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    time.sleep(1000)
