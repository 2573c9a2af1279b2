"""Which pages this process has locked for CUDA, and for how many tables. No jax in here."""

import dataclasses
import mmap
import threading

from gear_jax._errors import value_error
from gear_jax.external import _cupy


@dataclasses.dataclass
class _Pages:
    begin: int
    end: int
    ours: bool  # to unlock
    tables: int = 1


_mutex = threading.Lock()
_locked: list[_Pages] = []


def _whole_pages(pointer: int, nbytes: int) -> tuple[int, int]:
    page = mmap.PAGESIZE
    return pointer // page * page, -(-(pointer + nbytes) // page) * page


class PageLock:
    """Keeps the pages of a buffer locked until `release`. Tables of one buffer share the lock."""

    def __init__(self, pointer: int, nbytes: int, read_only: bool, device: int):
        """Locks the pages, unless a table has them locked already. Arguments and errors as of `_cupy.page_lock`.

        Raises:
          ValueError: if a part of them is locked for another table.
        """
        begin, end = _whole_pages(pointer, nbytes)
        with _mutex:
            for pages in _locked:
                if pages.begin <= begin and end <= pages.end:
                    pages.tables += 1
                    self._pages: _Pages | None = pages
                    return
                if begin < pages.end and pages.begin < end:
                    raise value_error(
                        "from_buffer: buffer", got="memory that shares pages with the buffer of another table",
                        wanted="pages of its own, or the same buffer",
                        fix="Pass the whole buffer for each table, with offset=.",
                    )  # fmt: skip
            ours = _cupy.page_lock(begin, end - begin, read_only, device)
            self._pages = _Pages(begin, end, ours)
            _locked.append(self._pages)

    def release(self) -> None:
        """Unlocks the pages if no other table has them. Again: does nothing."""
        with _mutex:
            pages = self._pages
            if pages is None:
                return
            if pages.tables == 1:
                if pages.ours:
                    _cupy.page_unlock(pages.begin)  # first: where it fails, the pages are still locked
                _locked.remove(pages)
            pages.tables -= 1
            self._pages = None
