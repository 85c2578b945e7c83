"""The promises of operators on columns and of losses, and the rows that they are tested on.

Named as module:function by dataflow/testing.py, as kernels are: it imports torch and hypothesis.

    promise.py    a promise, and how a broken one is told
    subject.py    what is tested: an operator or a loss, found by calling its function
    generate.py   strategies of rows and parameters
    values.py     strategies of single values, by type and meaning
    cases.py      generated rows: taking, renaming and changing them; batches of them
    columns.py    an operator's outputs, and comparing them
    operators.py  the promises of operators
    numbers.py    a loss's numbers, computed and reduced as a train kernel does
    numeric_gradients.py     derivatives by differences, detached numbers held constant
    loss_derivatives.py      those of a loss's terms, by backward and by differences
    loss_rows.py  what a loss's rows are made of
    losses.py     the promises of losses
    suite.py      testing them
"""
