// Compares attention of random shapes on every instruction set with its definition in double
// precision. Rows of different lengths grow by a prompt and then by steps, those with a window
// beyond the cache's capacity. The cache's buffers are exactly as large as their layout says, so
// that the sanitizers find accesses outside.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "attention.hpp"
#include "experts.hpp"
#include "random.hpp"

namespace {

using tandem::KvType;
using tandem::ValueType;
using tandem::checks::Random;

constexpr int kRounds = 60;
constexpr std::int64_t kProfiles = 3;  // profiles of a bias by distance
constexpr std::int64_t kMostPositions = 1000;  // per row

struct Shape {
  tandem::KvLayout layout;
  std::int64_t heads, kv_heads, rows, capacity_blocks, window;
  float scale, softcap;
  std::vector<float> sinks;  // per head, or empty
  std::int64_t ratio;  // of compressed keys besides the others; 0: no compressed keys
  std::vector<std::int64_t> always;  // per row: first positions seen besides the window; or empty
  std::int64_t extent;  // of a bias by distance; 0: no bias
  std::vector<float> profiles;  // (kProfiles, extent), the nearest distance first
  std::int64_t chunk;  // positions per chunk, of which a token sees its own; 0: all

  bool is_joint() const { return ratio > 0; }  // keys are their values, too
  // Per row.
  std::int64_t capacity() const { return capacity_blocks * tandem::kKvBlock; }
  bool is_ring() const { return window > 0 && always.empty() && window + tandem::kKvBlock <= capacity(); }
  std::int64_t num_compressed() const {
    return ratio > 0 ? kMostPositions / ratio : 0;
  }
};

Shape make_shape(Random& random, KvType type) {
  Shape s{};
  s.layout = {type, random.between(1, 80), random.between(1, 80)};
  s.kv_heads = random.between(1, 3);
  s.heads = s.kv_heads * random.between(1, 4);
  s.rows = random.between(1, 3);
  s.capacity_blocks = tandem::kKvChunk / tandem::kKvBlock * random.between(1, 3);
  s.window = random.between(0, 2) ? 0 : random.between(1, 100);
  s.chunk = random.between(0, 3) ? 0 : random.between(1, 100);
  s.scale = 1.0f / std::sqrt(static_cast<float>(s.layout.key_dim));
  s.softcap = random.between(0, 3) ? 0.0f : 20.0f;
  if (random.between(0, 2) == 0) s.sinks = random.normals(s.heads);
  if (s.window > 0 && random.between(0, 1))
    for (std::int64_t row = 0; row < s.rows; ++row) s.always.push_back(random.between(0, 120));
  if (random.between(0, 2) == 0) {
    s.extent = random.between(1, 90);
    s.profiles = random.normals(kProfiles * s.extent);
  }
  if (random.between(0, 1) && s.extent == 0 && s.always.empty()) {
    s.ratio = random.between(1, 5);
    s.heads /= s.kv_heads;
    s.kv_heads = 1;
    s.layout.value_dim = s.layout.key_dim;
  }
  return s;
}

// The content of the rows: keys and values by row, position and KV head.
struct History {
  std::vector<std::vector<float>> keys, values, compressed;

  explicit History(std::int64_t rows) : keys(rows), values(rows), compressed(rows) {}
};

// Tokens that are appended and attended in one call.
struct Step {
  std::vector<std::int64_t> rows, positions;
  std::vector<float> query, key, value, compressed, states, sinks;
  std::int64_t num_selected = 0, selected_heads = 1, selected_block = 1;
  std::vector<std::int32_t> selected;  // (tokens, selected_heads, num_selected), or empty
};

// Selects some positions for each token, or blocks for each head, each once and including the
// token's own. Every fourth token sees all.
void select(Random& random, const Shape& s, Step& step) {
  step.num_selected = random.between(1, 20);
  if (s.ratio == 0 && random.between(0, 1)) {
    step.selected_heads = s.kv_heads;
    step.selected_block = random.between(1, 100);
  }
  for (std::size_t t = 0; t < step.rows.size(); ++t)
    for (std::int64_t i = 0; i < step.selected_heads * step.num_selected; ++i) {
      const std::int64_t place = i % step.num_selected;
      const auto own = static_cast<std::int32_t>(step.positions[t] / step.selected_block);
      const auto any = static_cast<std::int32_t>(random.between(-1, own + 3));
      const auto begin = step.selected.end() - place;
      const bool is_new = std::find(begin, step.selected.end(), any) == step.selected.end();
      step.selected.push_back(place == 0 ? (t % 4 == 0 ? -1 : own) : is_new ? any : -1);
    }
}

bool is_seen(const Step& step, std::size_t token, std::int64_t position, std::int64_t kv_head) {
  const std::int64_t head = step.selected_heads == 1 ? 0 : kv_head;
  const std::int64_t of_head = static_cast<std::int64_t>(token) * step.selected_heads + head;
  const auto first = step.selected.begin() + of_head * step.num_selected;
  if (step.selected.empty() || *first < 0) return true;
  const std::int64_t number = position / step.selected_block;
  return std::find(first, first + step.num_selected, number) != first + step.num_selected;
}

// Makes a step of `count` more tokens for one row, or for every row.
Step make_step(Random& random, const Shape& s, const History& history, std::int64_t only_row,
               std::int64_t count) {
  Step step;
  for (std::int64_t row = 0; row < s.rows; ++row) {
    if (only_row >= 0 && row != only_row) continue;
    const auto filled =
        static_cast<std::int64_t>(history.keys[row].size()) / (s.kv_heads * s.layout.key_dim);
    const std::int64_t room =
        s.capacity() - (s.is_ring() ? s.window + tandem::kKvBlock : filled);
    for (std::int64_t n = 0; n < std::min(count, room); ++n) {
      step.rows.push_back(row);
      step.positions.push_back(filled + n);
    }
  }
  const auto tokens = static_cast<std::int64_t>(step.rows.size());
  step.query = random.normals(tokens * s.heads * s.layout.key_dim);
  step.key = random.normals(tokens * s.kv_heads * s.layout.key_dim);
  step.value = s.is_joint() ? step.key : random.normals(tokens * s.kv_heads * s.layout.value_dim);
  if (s.extent > 0) step.states = random.normals(tokens * s.heads * kProfiles);
  if (s.extent > 0 && random.between(0, 1)) step.sinks = random.normals(tokens * s.heads);
  if (s.ratio > 0) step.compressed = random.normals(tokens * s.layout.key_dim);
  if ((s.window == 0 || s.ratio > 0) && random.between(0, 1)) select(random, s, step);
  return step;
}

void remember(const Shape& s, const Step& step, History& history) {
  const std::int64_t key = s.kv_heads * s.layout.key_dim, value = s.kv_heads * s.layout.value_dim;
  for (std::size_t t = 0; t < step.rows.size(); ++t) {
    auto& keys = history.keys[step.rows[t]];
    auto& values = history.values[step.rows[t]];
    keys.insert(keys.end(), step.key.begin() + t * key, step.key.begin() + (t + 1) * key);
    values.insert(values.end(), step.value.begin() + t * value,
                  step.value.begin() + (t + 1) * value);
    if (s.ratio == 0) continue;
    auto& compressed = history.compressed[step.rows[t]];
    compressed.insert(compressed.end(), step.compressed.begin() + t * key,
                      step.compressed.begin() + (t + 1) * key);
  }
}

double score(const Shape& s, const float* query, const float* key, double bias) {
  double sum = 0;
  for (std::int64_t d = 0; d < s.layout.key_dim; ++d) sum += double{query[d]} * key[d];
  sum = sum * s.scale + bias;
  return s.softcap > 0 ? s.softcap * std::tanh(sum / s.softcap) : sum;
}

// The bias on a score; `at` is the index of the token and head.
double bias_of(const Shape& s, const Step& step, std::int64_t at, std::int64_t distance) {
  if (distance >= s.extent) return 0;
  double sum = 0;
  for (std::int64_t j = 0; j < kProfiles; ++j)
    sum += double{step.states[at * kProfiles + j]} * s.profiles[j * s.extent + distance];
  return sum;
}

void attend(const Shape& s, const History& history, const Step& step, std::size_t token,
            std::int64_t head, const float* query, float* out) {
  const std::int64_t row = step.rows[token], position = step.positions[token];
  const std::int64_t kv_head = head / (s.heads / s.kv_heads);
  std::vector<double> sums(s.layout.value_dim, 0.0);
  const std::int64_t of_head = static_cast<std::int64_t>(token) * s.heads + head;
  double total = s.sinks.empty() ? 0 : std::exp(double{s.sinks[head]});
  if (!step.sinks.empty()) total = std::exp(double{step.sinks[of_head]});
  const std::int64_t of_chunk = s.chunk > 0 ? position / s.chunk * s.chunk : 0;
  const std::int64_t first = s.window > 0 ? std::max(of_chunk, position + 1 - s.window) : of_chunk;
  const auto see = [&](const float* key, const float* value, double bias) {
    const double weight = std::exp(score(s, query, key, bias));
    for (std::int64_t d = 0; d < s.layout.value_dim; ++d) sums[d] += weight * value[d];
    total += weight;
  };
  const std::int64_t always = s.always.empty() ? 0 : s.always[row];
  for (std::int64_t p = 0; p <= position; ++p) {
    if ((p < first && p >= always) || (s.ratio == 0 && !is_seen(step, token, p, kv_head))) continue;
    const std::int64_t at = p * s.kv_heads + kv_head;
    see(history.keys[row].data() + at * s.layout.key_dim,
        history.values[row].data() + at * s.layout.value_dim,
        bias_of(s, step, of_head, position - p));
  }
  for (std::int64_t n = 0; s.ratio > 0 && n < (position + 1) / s.ratio; ++n) {
    if (!is_seen(step, token, n, 0)) continue;
    const float* key =
        history.compressed[row].data() + ((n + 1) * s.ratio - 1) * s.layout.key_dim;
    see(key, key, 0);
  }
  for (std::int64_t d = 0; d < s.layout.value_dim; ++d)
    out[d] = static_cast<float>(sums[d] / total);
}

std::vector<float> expected(const Shape& s, const History& history, const Step& step) {
  std::vector<float> out(step.rows.size() * s.heads * s.layout.value_dim);
  for (std::size_t t = 0; t < step.rows.size(); ++t)
    for (std::int64_t head = 0; head < s.heads; ++head) {
      const std::int64_t at = static_cast<std::int64_t>(t) * s.heads + head;
      attend(s, history, step, t, head, step.query.data() + at * s.layout.key_dim,
             out.data() + at * s.layout.value_dim);
    }
  return out;
}

// The cache of one engine.
struct Cache {
  std::vector<std::uint8_t> keys, values;

  Cache(const Shape& s, std::int64_t blocks)
      : keys(s.rows * s.kv_heads * blocks *
                 (s.is_joint() ? tandem::kKvBlock * s.layout.joint_bytes() : s.layout.key_block_bytes()),
             0xFF),
        values(s.is_joint() ? 0 : s.rows * s.kv_heads * blocks * s.layout.value_block_bytes(), 0xFF) {}
};

std::vector<float> run(tandem::AttentionEngine& engine, const Shape& s, Cache& cache,
                       std::vector<std::uint8_t>& compressed, const Step& step) {
  std::vector<float> out(step.rows.size() * s.heads * s.layout.value_dim);
  const std::int64_t key = s.layout.key_dim, value = s.layout.value_dim;
  tandem::AttentionCall call{
      s.layout, ValueType::kFp32, static_cast<std::int64_t>(step.rows.size()), s.heads, s.kv_heads,
      cache.keys.data(), cache.values.data(), s.capacity_blocks, step.rows.data(),
      step.positions.data(), {step.query.data(), s.heads * key, key},
      {step.key.data(), s.kv_heads * key, key}, {step.value.data(), s.kv_heads * value, value},
      s.scale, s.softcap, s.window, s.sinks.empty() ? nullptr : s.sinks.data(),
      step.selected.empty() ? nullptr : step.selected.data(), step.num_selected, out.data()};
  if (s.ratio > 0)
    call.compressed = {compressed.data(), s.rows, s.num_compressed(), s.ratio,
                       {step.compressed.data(), key, key}};
  std::vector<float> profiles;
  if (s.extent > 0) {
    call.bias = {{step.states.data(), s.heads * kProfiles, kProfiles}, nullptr, kProfiles, s.extent};
    profiles.resize(kProfiles * call.bias.width());
    for (std::int64_t j = 0; j < kProfiles; ++j)
      for (std::int64_t distance = 0; distance < s.extent; ++distance)
        profiles[j * call.bias.width() + call.bias.first(distance, 0)] =
            s.profiles[j * s.extent + distance];
    call.bias.profiles = profiles.data();
  }
  call.is_joint = s.is_joint();
  if (!step.sinks.empty()) call.token_sinks = step.sinks.data();
  call.chunk = s.chunk;
  call.selected_heads = step.selected_heads;
  call.selected_block = step.selected_block;
  if (!s.always.empty()) {
    call.always_seen = s.always.data();
    call.num_always_seen = s.rows;
  }
  engine.append(call);
  engine.run(call);
  return out;
}

bool is_near(const std::vector<float>& actual, const std::vector<float>& wanted, KvType type) {
  double error = 0;
  double size = 1e-30;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    error += std::pow(double{actual[i]} - wanted[i], 2);
    size += std::pow(double{wanted[i]}, 2);
  }
  const double limit = type == KvType::kFp32 ? 1e-5 : type == KvType::kBf16 ? 1.5e-2 : 4e-2;
  return std::sqrt(error / size) < limit;
}

// Runs a prompt of one row, then steps with a token for each row. Returns false at the first
// difference.
bool agrees(Random& random, const Shape& s, const std::string& isa) {
  tandem::ExpertEngine threads(static_cast<int>(random.between(1, 3)), "portable");
  tandem::AttentionEngine engine(threads.pool(), isa);
  Cache cache(s, s.capacity_blocks);
  std::vector<std::uint8_t> compressed(s.rows * s.num_compressed() * s.layout.joint_bytes(), 0xFF);
  History history(s.rows);
  for (int n = 0; n < 8; ++n) {
    const Step step = n % 3 == 0 ? make_step(random, s, history, random.between(0, s.rows - 1),
                                             random.between(1, 150))
                                 : make_step(random, s, history, -1, random.between(1, 3));
    if (step.rows.empty()) continue;
    remember(s, step, history);
    if (!is_near(run(engine, s, cache, compressed, step), expected(s, history, step), s.layout.type))
      return false;
  }
  return true;
}

// With emulated tiles (see CMakeLists.txt), AMX's kernels run on any processor with AVX-512.
std::vector<std::string> isas_here() {
  auto names = tandem::available_isas();
#if defined(TANDEM_EMULATE_TILES)
  const bool has_avx512 = std::find(names.begin(), names.end(), "avx512") != names.end();
  return has_avx512 ? std::vector<std::string>{"amx"} : std::vector<std::string>{};
#endif
  return names;
}

}  // namespace

int main() {
  Random random(2468);
  for (int round = 0; round < kRounds; ++round) {
    const auto type = static_cast<KvType>(round % 3);
    const Shape shape = make_shape(random, type);
    for (const std::string& isa : isas_here())
      if (!agrees(random, shape, isa)) {
        std::printf("round %d: %s differs, keys and values of type %d, %d and %d wide\n", round,
                    isa.c_str(), static_cast<int>(type), static_cast<int>(shape.layout.key_dim),
                    static_cast<int>(shape.layout.value_dim));
        return 1;
      }
  }
  std::printf("attention of %d random shapes equals its definition\n", kRounds);
  return 0;
}
