"""How rows of the batch pass through each op.

A value plays one of five roles; a rule says what role the result of an operation plays, given the roles of its arguments:

    input_ids  Rows(0)     position_ids  Same     labels  Rows(0)
        |                       |                    |
    embedding  Rows(0)     embedding  Same           |
        +----------- add -------+                    |
                      | Rows(0)                      |
                    linear  Rows(0) ---- view ---- cross_entropy_loss  Total("mean")

An operation without a rule, or one where rows meet in a way that no microbatch can repeat, gives ``Mixed``.
"""
