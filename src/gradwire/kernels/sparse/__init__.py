"""Sparse vectors on their way between ranks: their formats, their parts and their sums.

* ``entries``: a sparse vector as indices and values; the non-zero units of a dense one;
  the range of places that a rank serves, and the way back to indices
* ``permutation``: a seeded bijection of the index space, the hash that spreads entries
  over ranks
* ``partition``: entries grouped by the part they belong to
* ``merge``: entries of all ranks added up over one part
* ``scatter``: entries of a part written to the dense vector
* ``formats``: layouts on the wire, one in each file
* ``choose``: the smallest of them, by counts that all ranks know

A *unit* is ``width`` adjacent elements that travel together: 1 for single elements, the
number of columns for rows of an embedding, 256 for OmniReduce's blocks. A vector of N
elements has ceil(N / width) units. An *index* says where a unit lies in the vector, a
*place* where a permutation of the indices puts it; part w of W has the places [w L, (w
+ 1) L), where L is ceil(units / W), and a *local place* counts from the part's first.

Sparse collectives, compressors and planners call it. It knows counts and places, and
neither compressors nor how ranks talk. Legend: N elements, K entries, W ranks, L places
of a part, B bytes.
"""
