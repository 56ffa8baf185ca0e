"""The experiments behind the results, in the order in which data flows; not part of the installed package.

recipes/, data/, paper/   settings; class names, overlaps, looks at test sets; the paper's own numbers
fetch, sets, samples      data sets: prepare, read, move to a device
weights, captions         pretrained models; image-text pairs for training a dual encoder
engine, rows, tables      tasks, labs and methods; what methods say of each sample; tables made from that
measures, paper           metrics with intervals; the paper's numbers
classifiers, methods      the studies of classifiers: data and models of a seed, every method
zero_shot, zero_shot_sets the zero-shot study
paper_task                the paper's own tasks, for users who have its data
analyses, noise           the paper's analyses
"""
