// Draft trees: who is above whom, the part of some nodes, and the union of two.

#pragma once

#include "layers.h"

extern "C" {

// found [trees, i, j] = 1 if node j is i or an ancestor of i. parents [trees, count] come before their children; any
// other parent counts as the root.
void fsd_ancestors(const int64_t* parents, int64_t trees, int64_t count, uint8_t* found) {
  for (int64_t tree = 0; tree < trees; ++tree, parents += count, found += count * count) {
    std::memset(found, 0, count * count);
    for (int64_t node = 0; node < count; ++node) {
      uint8_t* const own = found + node * count;
      const int64_t parent = parents[node] >= 0 && parents[node] < node ? parents[node] : 0;
      if (node) std::memcpy(own, found + parent * count, count);
      own[node] = 1;
    }
  }
}

// The tree of nodes [trees, most] of each of `trees` trees of `count` nodes, in fields that `to` names: see keep_nodes in
// fsd_core/functional.py. q_index, drawn: [trees, count]. Returns how many nodes and parents are out of range; then nothing is
// written. Proposers and drawn may be null.
int64_t fsd_keep_nodes(int64_t trees, const fsd_tree* from, const int64_t* q_index, const uint8_t* drawn,
                       const int64_t* nodes, int64_t most, int64_t* tokens, int64_t* parents, int64_t* to_q,
                       int64_t* proposers, float* scores, uint8_t* to_drawn) {
  const int64_t count = from->count, wrong = outside(nodes, trees * most, count) + outside(from->parents, trees * count, count);
  if (wrong) return wrong;
  std::vector<int64_t> place(count);
  for (int64_t tree = 0; tree < trees; ++tree) {
    const int64_t first = tree * count, start = tree * most;
    std::fill(place.begin(), place.end(), 0);
    for (int64_t i = 0; i < most; ++i) place[nodes[start + i]] = i, to_q[start + i] = -1;
    for (int64_t i = 0; i < most; ++i) {
      const int64_t old = first + nodes[start + i], at = start + i;
      tokens[at] = from->tokens[old], parents[at] = place[from->parents[old]];
      scores[at] = from->scores[old] - from->scores[first + nodes[start]];
      if (proposers) proposers[at] = from->proposers[old];
      if (drawn) to_drawn[at] = drawn[old];
      const int64_t parent = parents[at];
      if (i && from->scores[old] != -INFINITY) to_q[start + parent] = q_index[first + nodes[start + parent]];
    }
  }
  return 0;
}

// Merge the trees `main` and `side`, which share the root, in each of `trees` rows. The nodes of main come first, then
// those of side without its root. GraftedDrafter in graft.py defines the scores. Padding has the score -inf.
void fsd_union(int64_t trees, const fsd_tree* main, const fsd_tree* side, int64_t mains, int64_t* tokens,
               int64_t* parents, float* scores, int64_t* proposers) {
  const float min_wrong = 0.001f;  // as MIN_WRONG in functional.py
  const int64_t first = main->count, own = side->count, count = first + own - 1;
  std::vector<int64_t> place(own);
  std::vector<float> chance(count), total(count), wrong(count);
  for (int64_t row = 0; row < trees; ++row, tokens += count, parents += count, scores += count, proposers += count) {
    const auto above = [&](const fsd_tree* tree, int64_t node) {
      const int64_t parent = tree->parents[row * tree->count + node];
      return parent >= 0 && parent < node ? parent : 0;
    };
    const auto put = [&](const fsd_tree* tree, int64_t node, int64_t at, int64_t parent, int64_t before) {
      const int64_t start = row * tree->count;
      const float score = tree->scores[start + node], step = score - tree->scores[start + above(tree, node)];
      tokens[at] = tree->tokens[start + node], parents[at] = parent;
      proposers[at] = before + (tree->proposers ? tree->proposers[start + node] : 0);
      // the step's chance; 0 at padding, also below padding
      chance[at] = score == -INFINITY ? 0.f : std::exp(std::min(step, 0.f));
    };
    std::fill(wrong.begin(), wrong.end(), 1.f);
    for (int64_t node = 0; node < first; ++node) {
      put(main, node, node, above(main, node), 0);
      if (node) wrong[parents[node]] -= chance[node];
    }
    place[0] = 0;
    for (int64_t node = 1; node < own; ++node) {
      const int64_t at = first - 1 + node, parent = place[above(side, node)];
      put(side, node, at, parent, mains);
      place[node] = at;
      for (int64_t same = 1; same < first && parent < first && chance[at] > 0; ++same)
        if (parents[same] == parent && tokens[same] == tokens[at] && chance[same] > 0) {
          chance[same] += chance[at] - chance[same] * chance[at];
          chance[at] = 0, place[node] = same;
        }
      chance[at] *= std::max(wrong[parent], min_wrong);
    }
    std::fill(total.begin(), total.end(), 0.f);
    for (int64_t node = 1; node < count; ++node) total[parents[node]] += chance[node];
    scores[0] = 0;
    for (int64_t node = 1; node < count; ++node)
      scores[node] = scores[parents[node]] + std::log(std::min(chance[node] / std::max(total[parents[node]], 1.f), 1.f));
  }
}

}  // extern "C"
