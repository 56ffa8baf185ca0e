"""The experiments behind docs/results.md, in the order in which data flows; not part of the installed package.

recipes/, data/, paper/   settings; class names, overlaps, looks at test sets; the paper's own numbers
fetch, sets, samples      data sets: prepare, read, move to a device
weights, captions         pretrained models; image-text pairs for training a dual encoder
engine, seed_folder       stages and jobs of a study; the folder that caches what a seed makes
task, seed, rows          classifiers: data, models of a seed, every method; `classifiers` has the stages
dual_recipe, dual_seed, dual_rows, dual_study    the same for the zero-shot study
paper_task                the paper's own tasks, for users who have its data
evidence, measures        per-sample model outputs; metrics computed from them, with intervals
column_files              file format of these outputs
storing, stored           results: write, read, compare
cells, claims, findings, dual_findings, all_tasks    tables of the documents, and a figure
analyses/                 the paper's analyses, and four of ours
circuit_draws, tower_scores    stand-alone experiments
"""
