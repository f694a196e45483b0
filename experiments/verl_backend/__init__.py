"""The cluster back end: any merge strategy inside verl's fully-asynchronous policy, without a fork (docs/verl.md).

Modules without verl: `replay_mode`, `merging`, `columns`, `statistics`, `cycle`, `settings`, `recorder`, `resources`,
`preflight`, `plan`, and `compose` and `launch`, which run.py imports. The others are imported where verl is: `start` by
a run that starts, `client`, `agent_loops`, `sglang_rows`, `live_rows`, `loss`, `shadow`, `rollouter`, `trainer` in
verl's workers.
"""
