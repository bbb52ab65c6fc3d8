"""Which contents are in which blocks of the two memories, so that they can be found.

Keeps contents and blocks pointing at each other: a content is known as long as any block of
either memory holds it, and every block that has one is among its content's blocks.
"""

from worker.integrity import copies_problems
from worker.prefix import Chain, Content, PrefixIndex
from worker.tier import Tier


class Published:
    """Over the tiers of one pool."""

    def __init__(self, device: Tier, host: Tier) -> None:
        self._device = device
        self._host = host
        self._index = PrefixIndex()

    def find(self, chain: Chain, index: int, parent: Content | None) -> Content | None:
        """The content of the chain's block after this parent, if any block holds it."""
        return self._index.find(chain, index, parent)

    def find_or_add(self, chain: Chain, index: int, parent: Content | None) -> Content:
        """The same, made if there is none. It is to be put into a block next."""
        return self._index.find_or_add(chain, index, parent)

    def put(self, block: int, content: Content) -> None:
        """This block holds it from now on."""
        content.device.append(block)
        self._device.contents[block] = content

    def put_on_host(self, host_block: int, content: Content) -> None:
        """This host block holds it from now on."""
        content.host.append(host_block)
        self._host.contents[host_block] = content

    def take_out(self, block: int) -> None:
        """What the block holds is not to be found in it any more."""
        content = self._device.contents[block]
        if content is not None:
            self._device.forget(block)
            content.device.remove(block)
            self.drop_unheld(content)

    def take_out_of_host(self, host_block: int) -> None:
        """The same of a host block."""
        content = self._host.contents[host_block]
        if content is not None:
            self._host.forget(host_block)
            content.host.remove(host_block)
            self.drop_unheld(content)

    def drop_unheld(self, content: Content) -> None:
        """Forget it if no block holds it."""
        if not (content.device or content.host):
            self._index.drop(content)

    def forget(self, content: Content) -> None:
        """It is in no block of either memory any more."""
        for block in list(content.device):
            self.take_out(block)
        for host_block in list(content.host):
            self.take_out_of_host(host_block)

    def flush(self) -> None:
        """Forget everything."""
        for content in list(self._index):
            self.forget(content)

    def problems(self) -> list[str]:
        """Where contents and blocks disagree."""
        return copies_problems(list(self._index), self._device, self._host)
