import time, os
from batchgen.grading.step import GradeFailure
def f(x):
    if x=="hang":
        5**(5**(5**5))
    if x=="die": os.kill(os.getpid(),9)
    if x=="exit": os._exit(3)
    if x=="mem": return len(bytearray(2<<30))
    if x=="raise": raise KeyError("x")
    if x=="typed": raise GradeFailure("no_target","hm")
    return x*2
