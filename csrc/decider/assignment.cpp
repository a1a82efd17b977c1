#include "decider/assignment.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "decider/sorting.hpp"

namespace tandem {

double seconds_of(const std::vector<double>& by_tokens, std::int32_t tokens) {
  if (tokens < 0 || static_cast<std::size_t>(tokens) >= by_tokens.size())
    throw std::out_of_range("an expert has " + std::to_string(tokens) +
                            " tokens, but costs are known only up to " +
                            std::to_string(by_tokens.size() - 1));
  return by_tokens[tokens];
}

void pose(const Costs& costs, const Ids& tokens, LayerProblem& problem) {
  problem.places.clear();
  problem.cpu.clear();
  problem.gpu.clear();
  for (const std::int32_t count : tokens) {
    problem.cpu.push_back(seconds_of(costs.cpu, count));
    problem.gpu.push_back(seconds_of(costs.gpu, count));
  }
  problem.cpu_first = costs.cpu_first;
  problem.link = costs.link;
  problem.cpu_slowdown = costs.cpu_slowdown;
  problem.link_slowdown = costs.link_slowdown;
  problem.copy_wake = costs.copy_wake;
  problem.read = costs.read;
}

void sort_by_cpu(const LayerProblem& problem, Positions& order) {
  sort_stably(order, [&](std::int32_t a, std::int32_t b) {
    return problem.cpu[a] > problem.cpu[b] ||
           (problem.cpu[a] == problem.cpu[b] && problem.scores[a] > problem.scores[b]);
  });
}

AsRead::AsRead(const LayerProblem& problem, std::span<const std::int32_t> on_cpu) {
  double end = 0.0;
  for (const std::int32_t i : on_cpu) {
    end += problem.read;
    seconds += problem.cpu[i];
    done = std::max(end, done) + problem.cpu[i];
  }
}

Split never_worse_than_cpu(Rule rule, const LayerProblem& problem, Split found) {
  Positions on_disk;
  double seconds = 0.0;
  for (std::int32_t i = 0; i < static_cast<std::int32_t>(problem.cpu.size()); ++i) {
    if (problem.is_on_disk(i))
      on_disk.push_back(i);
    else
      seconds += problem.cpu[i];
  }
  // DALI's equations have no surcharge for the first expert.
  if (rule != Rule::kDaliInGraph) seconds += problem.cpu_first;
  sort_stably(on_disk,
              [&](std::int32_t a, std::int32_t b) { return problem.cpu[a] > problem.cpu[b]; });
  const AsRead as_read(problem, on_disk);
  seconds = std::max(seconds + as_read.seconds, as_read.done);
  if (seconds >= std::max(found.gpu_seconds, found.cpu_seconds)) return found;
  Split all{{}, {}, 0.0, seconds};
  for (std::size_t i = 0; i < problem.wait.size(); ++i)
    if (problem.wait[i] >= 0.0) all.spill.push_back(static_cast<std::int32_t>(i));
  return all;
}

Split split(Rule rule, const LayerProblem& problem) {
  return rule == Rule::kBalanced ? balanced(problem) : in_graph(rule, problem);
}

}  // namespace tandem
