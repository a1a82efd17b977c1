#include "disk/expert_prediction.hpp"

#include <algorithm>
#include <utility>

#include "coordinator/words.hpp"

namespace tandem {
namespace {

// Of the latest uses: about so many count.
constexpr double kUses = 64.0;

void approach(double& average, double found) { average += (found - average) / kUses; }

}  // namespace

ExpertPrediction::ExpertPrediction(ForesightTables* tables, std::int32_t num_layers)
    : tables_(tables), averages_(num_layers), before_(num_layers) {}

void ExpertPrediction::begin(std::int32_t layer, std::span<const std::int32_t> experts, bool is_step,
                             bool is_missing) {
  if (tables_ == nullptr) return;
  const bool is_below = is_step && is_step_ && layer == layer_ + 1;
  above_ = is_below ? experts_ : Ids{};
  if (is_step && predicted_ != kNobody && layer == next_) {
    Averages& now = averages_[layer];
    const bool is_right = std::find(experts.begin(), experts.end(), predicted_) != experts.end();
    approach(now.right, is_right);
    approach(now.missing, is_missing);
    approach(now.idle, steady_seconds() - ended_);
  }
  predicted_ = kNobody;
  experts_.assign(experts.begin(), experts.end());
  layer_ = layer;
  is_step_ = is_step;
  is_taught_ = !is_step;
  taught_before_ = std::exchange(before_[layer], experts_);
}

void ExpertPrediction::learn() {
  if (is_taught_) return;
  is_taught_ = true;
  tables_->teach(layer_, experts_, Ids(experts_.size(), 1), above_, taught_before_);
}

std::int32_t ExpertPrediction::next(
    const std::function<bool(std::int32_t, std::int32_t)>& is_absent) {
  if (tables_ == nullptr || !is_step_) return kNobody;
  learn();
  next_ = (layer_ + 1) % static_cast<std::int32_t>(averages_.size());
  ended_ = steady_seconds();
  const auto scores = tables_->scores(next_, next_ == 0 ? Ids{} : experts_, before_[next_]);
  for (std::int32_t expert = 0; expert < static_cast<std::int32_t>(scores.size()); ++expert)
    if ((predicted_ == kNobody || scores[expert] > scores[predicted_]) && is_absent(next_, expert))
      predicted_ = expert;
  return predicted_ != kNobody && pays(averages_[next_]) ? predicted_ : kNobody;
}

// A right one has come, or begun, when it is wanted. A wrong one is in the way of what the layer
// misses, for what is left of it then.
bool ExpertPrediction::pays(const Averages& layer) const {
  const double won = std::min(read_, layer.idle), lost = std::max(0.0, read_ - layer.idle);
  return layer.right * won > (1.0 - layer.right) * layer.missing * lost && layer.right > 0.1;
}

void ExpertPrediction::note_read(double seconds) {
  if (read_ == 0.0) read_ = seconds;
  approach(read_, seconds);
}

}  // namespace tandem
