"""Puts jobs into a queue of a file that other processes work on.

    python docs/examples/enqueue.py jobs.db cat.png dog.png

`worker_process.py` is one of those that work. Here nothing works: the jobs wait in the file.
"""

from __future__ import annotations

import sys

import trio

from alkstore import open_store


async def main(path: str, images: list[str]) -> None:
    async with open_store(path) as store:
        queue = store.queue("images", max_attempts=5)
        for image in images:
            id = await queue.enqueue({"image": image}, key=image)  # the same image twice is one job, while it waits
            print(f"job {id}: {image}")
        counts = await queue.counts()
        print(f"{counts.ready} ready, {counts.dead} dead")


if __name__ == "__main__":
    path, *images = sys.argv[1:] or ["jobs.db", "cat.png", "dog.png"]
    trio.run(main, path, images)
