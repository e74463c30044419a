"""Who sits where, whose history survives, and what runs next. Standard library only; no clock and no I/O but in ``manager.py``."""

from strata.slots.machine import SlotMachine
from strata.slots.manager import SlotManager
from strata.slots.match import pack
from strata.slots.policy import SlotPolicy
from strata.slots.view import Counters, MachineView, SlotView

__all__ = ["Counters", "MachineView", "SlotMachine", "SlotManager", "SlotPolicy", "SlotView", "pack"]
