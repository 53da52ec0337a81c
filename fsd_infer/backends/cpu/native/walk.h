// The walk over draft trees above temperature 0 where rules keep the target's distribution.
#pragma once

#include "layers.h"
#include "statistics.h"

namespace {

// The walk over a round's trees, as exact_walk in fsd_infer/rules/walk.py has it. Numbers of nodes run on from tree to
// tree; contexts are nodes, too. P, Q: types of the logits of p and of q.
template <class P, class Q>
struct ExactWalk {
  const fsd_round& r;
  const int64_t nodes;
  std::vector<float> highest, total, gap, log_p, of_q;  // of p's rows: the largest and ln Σ e^x; of q's rows: the latter
  std::vector<int64_t> best;
  std::vector<double> weight, rest, prob;
  std::vector<uint8_t> is_draft, has_children, is_drawn, draws;

  explicit ExactWalk(const fsd_round& round)
      : r(round), nodes(r.batch * r.count), highest(nodes), total(nodes), gap(nodes), log_p(nodes), of_q(nodes),
        best(nodes), weight(nodes, 1.), rest(nodes), prob(nodes), is_draft(nodes), has_children(nodes),
        is_drawn(nodes), draws(nodes) {
    for (int64_t node = 0; node < nodes; ++node) {
      const int64_t parent = above(node);
      is_draft[node] = node % r.count && r.scores[node] != -INFINITY;
      is_drawn[node] = r.q && is_draft[node] && (!r.drawn || r.drawn[node]) && r.q_index[parent] >= 0;
      if (is_draft[node]) has_children[parent] = 1;
      if (is_drawn[node]) draws[parent] = 1;
    }
  }

  int64_t above(int64_t node) const { return node - node % r.count + r.parents[node]; }
  const P* p(int64_t node) const { return (const P*)r.p + node * r.columns; }
  const Q* q(int64_t node) const {
    return (const Q*)r.q + (node / r.count * r.drafts + std::max<int64_t>(r.q_index[node], 0)) * r.drafted;
  }

  // Read the row of p at a node, and the row of q below which one was drawn.
  void read(int64_t node) {
    const Maximum found = maximum(p(node), r.columns);
    highest[node] = total[node] = found.value, best[node] = found.place;
    if (has_children[node] && std::isfinite(found.value)) total[node] = log_sum_exp(p(node), r.columns, found.value);
    if (draws[node]) of_q[node] = log_sum_exp(q(node), r.drafted);
  }

  // ln q of a draft, where one of its siblings was drawn, or it was.
  float log_q(int64_t node) const {
    const int64_t* const end = r.draft_ids + r.drafted;
    int64_t entry = r.tokens[node];
    if (r.draft_ids && (entry = std::find(r.draft_ids, end, entry) - r.draft_ids) == r.drafted) return -INFINITY;
    return number(q(above(node))[entry]) - of_q[above(node)];
  }

  // Find ln p of each draft and the weights of block verification, down the tree.
  void weigh(int64_t tree) {
    for (int64_t node = tree * r.count; node < (tree + 1) * r.count; ++node) {
      const int64_t parent = above(node);
      gap[node] = INFINITY;
      if (is_draft[node]) gap[node] = std::max(highest[parent] - number(p(parent)[r.tokens[node]]), 0.f);
      log_p[node] = highest[parent] - total[parent] - gap[node];
      if (is_drawn[node]) weight[node] = std::min(weight[parent] * std::exp((double)log_p[node] - (double)log_q(node)), 1.);
    }
  }

  void measure(int64_t node) {
    if (draws[node])
      rest[node] = divergence<RESIDUAL>(p(node), r.columns, q(node), r.drafted, r.draft_ids, (float)weight[node]);
  }

  // Find the probability that each node follows its parent: see block_accept_probs in fsd_core/sampling.py.
  void judge(int64_t tree) {
    const double tiny = 1e-30;  // as TINY in sampling.py
    std::vector<double> below(r.count), within(r.count);
    const int64_t first = tree * r.count;
    for (int64_t i = r.count - 1; i >= 0; --i) {
      const int64_t node = first + i;
      double here = weight[node];
      if (draws[node] && here < 1) here = rest[node] / std::max(rest[node] + 1 - here, tiny);
      within[i] = below[i] + (1 - below[i]) * here;
      if (is_drawn[node]) below[r.parents[node]] = within[i];
    }
    for (int64_t i = 0; i < r.count; ++i) {
      const int64_t node = first + i, at = r.parents[node], parent = first + at;
      const double goes_on = std::min(below[at] / std::max(within[at], tiny), 1.), own = std::exp((double)log_p[node]);
      prob[node] = own;
      if (is_drawn[node]) prob[node] = goes_on;
      else if (draws[parent] && is_draft[node]) {
        const double left = std::max(weight[parent] * own - std::exp((double)log_q(node)), 0.);
        prob[node] = (1 - goes_on) * std::min(left / std::max(rest[parent], tiny), 1.);
      }
    }
  }

  // Walk down a tree: the path and what is emitted along it.
  void emit(int64_t tree, const fsd_walked& to) {
    const int64_t first = tree * r.count;
    const float* const uniforms = r.uniforms + tree * r.stride;
    std::vector<double> left(r.count);
    std::vector<int64_t> path{0}, choice(r.count, -1), refused(r.count, -1);
    for (int64_t i = 0; i < r.count; ++i) left[i] = uniforms[3 * i];
    for (int64_t i = 0; i < r.count; ++i) {
      const int64_t node = first + i, at = r.parents[node];
      const double offset = left[at];
      left[at] -= prob[node];
      if (i && at == path.back() && offset >= 0 && offset < prob[node]) path.push_back(i);
      if (!is_draft[node] || (r.drawn && r.drawn[node])) continue;
      if (choice[at] < 0 || r.scores[node] > r.scores[first + choice[at]]) choice[at] = i;
    }
    const int64_t accepted = (int64_t)path.size() - 1, end = path.back(), last = first + end;
    for (int64_t i = 1; i < r.count; ++i)
      if (is_draft[first + i] && r.parents[first + i] == end) refused[i] = r.tokens[first + i];
    const float of_end = draws[last] ? (float)weight[last] : 1.f;
    int64_t token = drawn_rest(p(last), r.columns, of_end, draws[last] ? q(last) : nullptr, r.drafted, r.draft_ids,
                               refused.data(), r.count, uniforms[3 * end + 1]);
    if (token == r.columns) token = best[last];  // all may round to 0
    to.accepted[tree] = accepted;
    for (int64_t step = 0; step < to.width; ++step) {
      const int64_t at = tree * to.width + step, node = path[std::min(step, accepted)];
      const int64_t chosen = step > accepted ? -1 : choice[node];
      to.path[at] = node;
      to.tokens[at] = step < accepted ? r.tokens[first + path[step + 1]] : step == accepted ? token : 0;
      to.sources[at] = step < accepted;  // TokenOrigin.EXACT, else TARGET
      to.first_choices[at] = chosen;
      to.gaps[at] = chosen < 0 ? NAN : gap[first + chosen];
    }
  }

  // Count logits that are not finite, and nodes of chains with several children.
  int64_t faults() const {
    const auto broken = [](int narrow, const void* x, int64_t row, int64_t columns) {
      const int64_t at = row * columns;
      return !std::isfinite((narrow ? maximum((const bf16*)x + at, columns) : maximum((const float*)x + at, columns)).value);
    };
    int64_t count = 0;
    std::vector<int64_t> children(nodes);
    for (int64_t node = 0; node < nodes; ++node) {
      const int64_t row = node / r.count * r.drafts + r.q_index[node];
      count += !std::isfinite(highest[node]) || std::isnan(r.scores[node]);
      count += r.logits && broken(r.narrow_logits, r.logits, node, r.columns);
      count += r.q && r.q_index[node] >= 0 && broken(r.narrow_q_logits, r.q_logits, row, r.drafted);
      count += is_draft[node] && ++children[above(node)] > 1 && r.q && !r.drawn;
    }
    return count;
  }

  // Returns the number of faults; if there are any, nothing is written.
  int64_t run(const fsd_walked& to, int threads) {
    int64_t wrong = 0;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
      for (int64_t node = 0; node < nodes; ++node) read(node);
#pragma omp single
      if (!(wrong = faults()))
        for (int64_t tree = 0; tree < r.batch; ++tree) weigh(tree);
#pragma omp for schedule(dynamic)
      for (int64_t node = 0; node < nodes; ++node)
        if (!wrong) measure(node);
#pragma omp for
      for (int64_t tree = 0; tree < r.batch; ++tree)
        if (!wrong) judge(tree), emit(tree, to);
    }
    return wrong;
  }
};

}  // namespace
