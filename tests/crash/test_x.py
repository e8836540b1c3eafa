import pytest
from tests.crash.test_statements import *
@pytest.mark.parametrize("name", [n for n,v in vars(processors).items() if isinstance(v, BatchProcessor)])
def test_x(nursery, audit, name):
    import time
    t=time.time()
    b = boundaries_of(name, audit, FIRST if "retry" in name else None)
    print("==", name, len(b), time.time()-t)
    for x in b: print(x.name, sorted(x.pks), x.commits)
