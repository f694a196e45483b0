"""The cluster back end: any merge strategy inside verl's fully-asynchronous policy, without a fork (docs/verl.md).

Modules without verl: `replay_mode`, `merging`, `resources`, `preflight`, `plan`. The others are imported where verl is:
`compose`, `launch` by run.py, `client`, `agent_loops`, `sglang_rows`, `live_rows`, `loss`, `trainer` in verl's workers.
"""
