// Runs a fuzz target if the compiler has no libFuzzer, with its options -max_total_time=SECONDS,
// -runs=N, -seed=N, -artifact_prefix=PATH, and directories or files of inputs, which are tried
// first. Then it makes inputs blindly, from random bytes and earlier inputs. An input that ends the
// process is kept.
#include <sanitizer/common_interface_defs.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "../checks/random.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
// Makes UBSan abort, because it would end the process without the callback below.
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1"; }

namespace {

using Bytes = std::vector<std::uint8_t>;
using tandem::checks::Random;
namespace files = std::filesystem;

constexpr std::int64_t kLongest = 512;
constexpr std::size_t kMostKept = 256;

Bytes current;
std::string kept_as = "crash";

void keep_input() {
  std::FILE* file = std::fopen(kept_as.c_str(), "wb");
  if (file == nullptr) return;
  std::fwrite(current.data(), 1, current.size(), file);
  std::fclose(file);
  std::fprintf(stderr, "the input is in %s\n", kept_as.c_str());
}

void run(Bytes input) {
  current = std::move(input);
  LLVMFuzzerTestOneInput(current.data(), current.size());
}

Bytes read(const files::path& path) {
  std::ifstream file(path, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(file), {});
}

Bytes changed(Random& random, const std::vector<Bytes>& before) {
  const auto number = random.between(0, static_cast<std::int64_t>(before.size()) - 1);
  Bytes bytes = before[static_cast<std::size_t>(number)];
  if (bytes.empty() || random.between(0, 3) == 0) {
    bytes.resize(static_cast<std::size_t>(random.between(1, kLongest)));
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random.between(0, 255));
    return bytes;
  }
  for (std::int64_t n = random.between(1, 6); n > 0; --n) {
    const auto at = static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(bytes.size()) - 1));
    bytes[at] = static_cast<std::uint8_t>(random.between(0, 255));
  }
  return bytes;
}

}  // namespace

int main(int count, char** arguments) {
  double seconds = 0;
  std::int64_t runs = INT64_MAX;
  unsigned seed = 1;
  std::vector<Bytes> before;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i], value = argument.substr(argument.find('=') + 1);
    if (argument.starts_with("-max_total_time=")) seconds = std::stod(value);
    else if (argument.starts_with("-runs=")) runs = std::stoll(value);
    else if (argument.starts_with("-seed=")) seed = static_cast<unsigned>(std::stoul(value));
    else if (argument.starts_with("-artifact_prefix=")) kept_as = value + "crash";
    else if (files::is_directory(argument))
      for (const auto& entry : files::directory_iterator(argument)) before.push_back(read(entry.path()));
    else before.push_back(read(argument));
  }
  __sanitizer_set_death_callback(keep_input);
  std::signal(SIGABRT, [](int) { keep_input(); });
  for (const Bytes& input : before) run(input);
  const std::size_t num_given = before.size();
  before.emplace_back();
  Random random(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::int64_t done = 0;
  for (; done < runs && std::chrono::steady_clock::now() < end; ++done) {
    run(changed(random, before));
    if (before.size() < num_given + kMostKept) before.push_back(current);
    else before[num_given + static_cast<std::size_t>(random.between(0, kMostKept - 1))] = current;
  }
  std::printf("%zu inputs that were found before, %lld new ones: none ends the process\n", num_given,
              static_cast<long long>(done));
  return 0;
}
