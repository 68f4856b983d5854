"""An auditor: what does a hook, a patch or a library touch, for whom, and what does it leave?

```python
from experiments.audit import audit

result = audit(press(model), model)     # a context manager, or a callable
result.counts()                         # by reach: while open, while running, left
print(result.to_markdown())
```
"""

from experiments.audit.changes import LEFT, OPEN, RUNNING, Audit, Change, audit, differences
from experiments.audit.snapshot import (
    CALL,
    CLASS,
    INSTANCE,
    PROCESS,
    REACHES,
    THREAD,
    Place,
    snapshot,
)

__all__ = [
    "CALL",
    "CLASS",
    "INSTANCE",
    "LEFT",
    "OPEN",
    "PROCESS",
    "REACHES",
    "RUNNING",
    "THREAD",
    "Audit",
    "Change",
    "Place",
    "audit",
    "differences",
    "snapshot",
]
