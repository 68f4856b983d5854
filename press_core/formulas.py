"""All formulas, for the lists of presses of both mechanisms."""

from press_core.learned.fast_kvzip import *
from press_core.learned.kvzap import *
from press_core.learned.lukv import *
from press_core.learned.measured import *
from press_core.learned.restorekv import *
from press_core.presses.chunks import *
from press_core.presses.composed import *
from press_core.presses.decoding import *
from press_core.presses.finch import *
from press_core.presses.keys import *
from press_core.presses.positions import *
from press_core.presses.queries import *
from press_core.presses.wrappers import *
from press_core.replay.kvzip import *
from press_core.replay.rows import *
