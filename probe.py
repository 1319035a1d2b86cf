import time
from batchgen.grading.rows import Grader
from batchgen.grading.extract import Extract
from batchgen.grading.grade import Grade
text="lorem ipsum dolor sit amet "*40+" so the answer is \\boxed{%d}."
rows=[(text%(i%1000), {"target":str(i%999)}) for i in range(20000)]
with Grader([Extract(), Grade(method="integer")]) as g:
    t=time.process_time(); out=list(g.grade(rows)); print("integer us/row", (time.process_time()-t)/len(rows)*1e6, sum(o["mark"] for o in out), out[5])
from itertools import cycle,islice
cases=[("\\frac{1}{2}","0.5"),("x^2+1","1+x^2"),("\\sqrt{8}","2\\sqrt{2}"),("3\\pi","9.42"),("\\left(3,\\frac{\\pi}{2}\\right)","(3, \\pi/2)"),("6-5i","6-5i"),("10","11"),("\\frac{3}{4}","3/4"),("2x+3","3+2x"),("\\{1,2\\}","\\{2,1\\}"),("p-q","q-p"),("\\frac{\\sqrt{3}}{2}","\\sqrt{3}/2")]
rows=[("\\boxed{%s}"%a,{"target":t}) for t,a in islice(cycle(cases),1200)]
with Grader([Extract(), Grade(method="math")]) as g:
    list(g.grade(rows[:24]))
    t=time.time(); out=list(g.grade(rows)); dt=time.time()-t; print("math/s", len(rows)/dt, sum(o["mark"] for o in out)/len(out))
    for c,o in zip(cases,out): print(c,o["mark"],o["answer_key"],o["grade_error"])
    t=time.time(); print(list(g.grade([("\\boxed{\\dfrac{5^{\\left(5^{\\left(5^{\\left(5^5\\right)}\\right)} - 4\\right)} - 5}{16}}",{"target":"5"}),("\\boxed{1}",{"target":"1"})])), time.time()-t)
