"""The text of docs/policies.md; the numbers come from `report.py`."""

INTRODUCTION = """
# Policies, measured on real routing

Written by `python -m benchmarks.policy.report`; do not edit by hand. Times of plans on this
machine: `python -m benchmarks.runtime.overhead --bookkeeping-only`. One case: `tandem simulate
TRACE --json`.

The traces are those of DeepSeek-V2-Lite (26 MoE layers, top-6 of 64) and gpt-oss-20b (24 layers,
top-4 of 32); see data/traces/README.md. All numbers here come from the odd sequences, from a cold
start; tables are learned online. The split is not fully clean. The constants of `next-use` and
`regression` were fitted on the even sequences, but we compared their variants on both halves. We
chose the planner's rules (one copy on an idle link, the price of link time, token-weighted counts,
no staging) while looking at runs over whole traces. We chose how a prompt counts in `next-use`, and
the weight of its counts, on these odd sequences. So speeds and the prefetch row are not held out in
the strict sense; traces of other models are the test.
Machines are simulated as CPU, GPU and link with the profiles in src/tandem/hardware/profiles, which
name their sources. These are literature, not measurements: ratios mean more than absolutes. The
figures leave out the host's own work (`--host-path none`), which
`python -m benchmarks.policy.host_costs` has.
"""

SPECULATION = """
## Drafted tokens: the length by cost against fixed lengths

`tandem simulate TRACE --speculate n-gram|mtp=ACCEPTANCE|sure-mtp=ACCEPTANCE --length auto|K`
verifies drafted tokens in a trace's decode steps. `n-gram` looks the latest tokens up in the
sequence so far, as prompt look-up does in real runs. `mtp` drafts the true next tokens, each with
the given chance of acceptance, and takes the time of a layer for each. In `sure-mtp` chances differ
from token to token and the drafter reports them, as draft models and MTP layers do in real runs;
they are drawn from a beta distribution of sample size 1.5. All lengths draft the same known tokens.
Accepted tokens route as in the trace, a rejected one like another token of it. `auto` is the code
that chooses in real runs (`tandem.policy.speculation`), on the virtual clock. Its costs are what
the latest tokens' experts would take together, with resident ones on the GPU, corrected by measured
steps; its rates of acceptance are those observed so far. The table has desktop-12gb at batch 1 with
half the experts resident, and gives speed over no speculation:
`python -m benchmarks.policy.speculation --gpu-experts 0.5 --limit 1500 [--sure]`:

| drafter | gpt-oss: best length | its speed | auto | deepseek: best length | its speed | auto |
|---|---|---|---|---|---|---|
| n-gram | 2 | 1.10 | 1.11 | | | |
| mtp=0.5 | 1 | 1.11 | 1.09 | 1 | 1.18 | 1.17 |
| mtp=0.6 | 2 | 1.22 | 1.21 | 2 | 1.31 | 1.29 |
| mtp=0.7 | 3 | 1.39 | 1.39 | 3 | 1.50 | 1.45 |
| mtp=0.8 | 5 | 1.68 | 1.65 | 5 | 1.77 | 1.77 |
| mtp=0.9 | 7 | 2.29 | 2.24 | 7 | 2.39 | 2.39 |
| sure-mtp=0.5 | 2 | 1.14 | 1.29 | 1 | 1.19 | 1.32 |
| sure-mtp=0.6 | 2 | 1.31 | 1.46 | 3 | 1.34 | 1.46 |
| sure-mtp=0.7 | 3 | 1.44 | 1.64 | 3 | 1.56 | 1.74 |
| sure-mtp=0.8 | 5 | 1.69 | 1.90 | 5 | 1.85 | 2.03 |
| sure-mtp=0.9 | 7 | 2.45 | 2.54 | 7 | 2.51 | 2.64 |

`auto` over the best fixed length, which is not known in advance, has a mean of .990 (worst .967) if
all drafted tokens are equally likely, 1.10 (worst 1.035) if the drafter reports how likely they
are, and 1.05 over both. With no expert resident it has .989 (worst .929, where it gave up once).
With the rate of acceptance known from the start it had .998 on gpt-oss-20b.
"""

SECTIONS = {
    "assignment": """
## Assignment against the optimum

Half the experts are resident, on `dali-testbed`. The table gives the time of each policy's answer
under equations 3 to 9 over the exact optimum (a Pareto frontier with a linear-relaxation bound;
above 64 active experts the bound itself). Here `balanced` minimises the equations. By default it
minimises what an executor really runs, where copies overlap with computation, and CPU and link slow
each other by the profile's factors. Such plans are at the exact optimum of overlapped copies
(second row of the first table; `tandem.sim.exact_overlapped`) and above that of the equations
(third row). The equations' plans were up to 11 % slower at batch 8 and 10 % at batch 32 with CPU,
GPU and link, over 48 cells (docs/decisions/0002-overlapped-plans.md). `--costs equations` executes
them; a simulation reports all three. The 0.00 % depends on profiles whose GPU time hardly changes
with the token count below 32 tokens; there, in property tests, the search equals brute force.
""",
    "eviction": """
## Eviction: hit rate, and the share of the gap from LRU to Belady that is closed

Every token is a decode step, with sequences side by side, a free link, no prefetch, and equal total
slots (ours keeps one for fetches). Belady may bypass the cache, so it bounds every policy with
admission.
DALI's window loses to LRU at batch 1, where counts over a window of four tokens say little. It wins
at batch 8 on both traces, and at batch 32 on DeepSeek-V2-Lite only.
`next-use` starts with LRU. In each layer it then follows its own prediction, LRU or a decayed
count, whichever has more hits in a ghost cache (docs/decisions/0014-eviction-rules.md).
`python -m benchmarks.policy.never_below_lru` checks whether it is ever below LRU, on real and
synthetic routing of 32 to 512 experts. We chose its margins on the speeds below and on that check.
""",
    "prediction": """
## Prediction

At batch 1, each predictor names the experts of the next layer once the layer above is known, after
1,000 tokens of learning. `regression` is one regression over transitions, the step before and the
token; it also uses hints of a router that is run ahead, where the engine or a trace has them. A
dash means that the trace lacks what the predictor needs (router inputs, token ids).
""",
    "speed": """
## Speed against LRU with insertion on every miss, and what prefetch adds

The table gives decode tokens per second on the virtual clock, with the link charged for every copy;
all columns use the assignment `balanced`.
""",
    "systems": """
## The systems at equal GPU memory, DALI's testbed

One fifth of the sequences is held out and provides popularity for Fiddler; HybriMoE, DALI and
Tandem start with random experts, as in DALI's paper. [papers.md](papers.md) says how the others run
here, and what their papers state.
""",
}

NEGATIVE_RESULTS = """
## What did not work

- Slots reserved for prefetched experts cost more hits than prefetch brings: up to -2 % speed on
  gpt-oss-20b at two prefetches. A prefetch now takes the slot of a resident that is less likely
  to be used.
- Prefetch gains little where the CPU computes misses: at most +0.8 % here. With staging slots
  it gained at most +1.8 %, and lost up to 2 % elsewhere. Slow links hardly ever prefetch.
- Prefetching whenever a single copy pays: cells with one to four such copies in a run ended at
  0.9999 to 1.0003 of the speed without, even where all copies were used. This is chance. On
  gpt-oss-20b, desktop-12gb, batch 1, 50 %, one expert resident at the start instead of none changes
  5.0 s by -0.9 to +0.9 ms, and those two copies cost 0.5 ms. Where copies are many, one saves
  about 0.1 ms. So Tandem makes them only where chances for them recur, once in 512 layers or more
  often. Asking the cache's own admission as well, or leaving prompts out, did not help.
- Allowing background copies only within the window before the next layer starves slow links
  (laptop, batch 1: 55 instead of 71 tok/s); the planner now always allows one copy on an idle link.
- Insertion on every miss saturates the link at batch 8: LRU runs at .46 to .66 of our speed there.
- Single decayed counts (.97) are below LRU at batch 1 and 25 % on DeepSeek-V2-Lite.
- Against HybriMoE's schedule with true costs and no background copies, Tandem does not reach 1.5 x.
  On DeepSeek-V2-Lite at batch 32 it was 3 % slower in this short run (60 steps). The cause was not
  its plans, which are the optimum of each layer, but what it kept: the prompt of one sequence that
  joined 31 others counted as 16 of their steps. Now a prompt's tokens are divided by the number of
  running sequences, and counts weigh twice as much against the prediction (870 to 899 tok/s; 808 to
  829 over 6,400 tokens). HybriMoE's cache score under our plans is still 0.3 % ahead in the short
  run there, and 1.3 % behind in the long one; elsewhere it was up to 11 % behind.
- Keeping every fetched expert, because its copy is paid for, gained 1 to 2.5 % on DeepSeek-V2-Lite
  at batch 8 and 32, and lost 1 to 2 % on gpt-oss-20b at batch 8. Faster counts (1/2 and 1/8 instead
  of 1/4 and 1/16) gave the same result, and -1 % on gpt-oss-20b at batch 4 and 8 on slow links.
- A horizon that follows the cache's size (discount 1 - 1 / 2r, r = slots / top-k) closed .52 of the
  gap instead of .45 at 50 % of DeepSeek-V2-Lite, and .37 instead of .39 on gpt-oss-20b; at 25 % it
  made no difference. 10 steps and .85 closed .48 and .40 at 50 %, but .435 instead of .448 on
  gpt-oss-20b at 25 %. (The first 6,000 tokens at 50 %, 9,000 at 25 %, batch 1.)
- Another rule for leaving a rule: leads of hits that fade by 1/256 in each step, and a margin of 6
  hits. It cost up to 2.2 % of speed on DeepSeek-V2-Lite (layers left the prediction while it
  learned) and missed leads that grow slowly (-.0066 of hit rate in 512 experts). Counting from the
  best moment instead needs no fading. Counting a prompt's hits cost up to .3 %.
- Starting with LRU in each layer separately, and leaving it at four standard deviations of the
  hits' difference: never below LRU, but .427 and .434 of the gap instead of .440 and .441 at batch
  1 and 25 %, because one layer needs hundreds of steps to tell. All layers together need some tens.
- The same with sums that are never reset: 2 % of speed lost in short runs on DeepSeek-V2-Lite,
  where the prediction is behind for 60 steps after a first prompt. Copying every miss costs more
  there than its hits bring.
- Least squares over the prediction, three counts and a learned curve of reuse by age, instead of
  fixed weights: .42 of the gap instead of .41 and .37 instead of .36 on traces cut into short
  sequences, and up to -.03 of hit rate where most experts of a large model are resident.
- Starting from the popularity of other requests did not help: 844 tok/s in that cell, 870 after
  changing to random experts and to token-weighted counts (two changes, not separated).
"""
