"""How much of the device is evictable and how much is held, as SGLang's controller asks for it."""

from __future__ import annotations

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

FULL = ComponentType.FULL


class Sizes:
    """Tokens of `self.tree`, a `SlotTree`; there is no other component than FULL."""

    def evictable_size(self) -> int:
        return self.full_evictable_size()

    def protected_size(self) -> int:
        return self.tree.protected

    def full_evictable_size(self) -> int:
        # A pin whose time is over holds nothing back from admission.
        self.tree.expire_pins()
        return self.tree.evictable

    def full_protected_size(self) -> int:
        return self.tree.protected

    def component_evictable_size(self, component_type: ComponentType) -> int:
        return self.tree.evictable if component_type == FULL else 0

    def component_protected_size(self, component_type: ComponentType) -> int:
        return self.tree.protected if component_type == FULL else 0

    def swa_evictable_size(self) -> int:
        return 0

    def swa_protected_size(self) -> int:
        return 0

    def mamba_evictable_size(self) -> int:
        return 0

    def mamba_protected_size(self) -> int:
        return 0
