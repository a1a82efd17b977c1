// One word for each expert that is copied for the current layer. It says who computes the expert:
//
//   open -> landed    by the copying thread, after the last byte: the device computes it
//   open -> claimed   by the answering thread, if the bytes have not come in time: the CPU does
//
// Only one of the two succeeds. A word is reused for a later fetch with another number in it, so a
// copy that ends after its layer changes nothing.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace tandem {

class FetchWord {
 public:
  FetchWord() = default;  // for a copy that no layer waits for
  FetchWord(std::atomic<std::uint64_t>* word, std::uint64_t number)
      : word_(word), open_(number << 2) {}

  bool is_open() const { return word_ != nullptr && word_->load() == open_; }
  bool has_landed() const { return word_ != nullptr && word_->load() == (open_ | kLanded); }
  bool land() const { return become(kLanded); }
  bool claim() const { return become(kClaimed); }

 private:
  static constexpr std::uint64_t kLanded = 1, kClaimed = 2;

  bool become(std::uint64_t state) const {
    std::uint64_t open = open_;
    return word_ != nullptr && word_->compare_exchange_strong(open, open_ | state);
  }

  std::atomic<std::uint64_t>* word_ = nullptr;
  std::uint64_t open_ = 0;
};

// The words of one layer at a time. The answering thread opens them.
class FetchWords {
 public:
  explicit FetchWords(std::int64_t most)
      : words_(std::make_unique<std::atomic<std::uint64_t>[]>(most)), most_(most) {}

  FetchWord open() {
    std::atomic<std::uint64_t>* word = &words_[static_cast<std::size_t>(++opened_ % most_)];
    word->store(opened_ << 2);
    return {word, opened_};
  }

 private:
  const std::unique_ptr<std::atomic<std::uint64_t>[]> words_;
  const std::uint64_t most_;
  std::uint64_t opened_ = 0;
};

}  // namespace tandem
