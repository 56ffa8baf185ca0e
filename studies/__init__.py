"""The experiments behind docs/results.md, in the order in which data flow; not part of the installed package.

recipes/, data/, paper/   settings, names and overlaps of classes, the paper's own numbers
fetch, sets, samples      data sets: prepared, read, on a device
weights, captions         models that training starts from; pairs that a dual encoder learns from
engine, seed_folder       stages and jobs of a study; what a seed makes stays in its folder
task, seed, rows          classifiers: data, models of a seed, every method; `classifiers` are its stages
dual_recipe, dual_seed, dual_rows, dual_study    the same of the zero-shot study
paper_task                the paper's own tasks for those who have its data
evidence, measures        what a model says about every sample; numbers from that, with intervals
column_files              that, in files
storing, stored           results: written, read, compared
cells, claims, findings, dual_findings, all_tasks    tables of the documents, and a figure
analyses/                 analyses of the paper, and three of ours
circuit_draws, tower_scores    experiments that stand alone
"""
