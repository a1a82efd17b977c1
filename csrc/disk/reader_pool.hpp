// Threads that read parts of files into memory, past the system's page cache where it allows that.
// A read is cut into pieces, so that even one fills a disk's queue. What is waited for goes first;
// what may be wanted later is read while nothing else is asked for.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "home_process.hpp"

namespace tandem {

constexpr std::int64_t kDiskPage = 4096;  // what unbuffered reads begin at and are multiples of

constexpr std::int64_t whole_pages(std::int64_t bytes) {
  return (bytes + kDiskPage - 1) / kDiskPage * kDiskPage;
}

// A file that stays open. Throws std::runtime_error that says which and why.
class ExpertFile {
 public:
  explicit ExpertFile(const std::string& path);
  ~ExpertFile();
  ExpertFile(ExpertFile&& other) noexcept;
  ExpertFile(const ExpertFile&) = delete;
  ExpertFile& operator=(const ExpertFile&) = delete;

  const std::string& path() const { return path_; }
  std::int64_t bytes() const { return bytes_; }
  // Whether reads pass by the page cache; where the file system refuses, they are let go after.
  bool is_direct() const { return is_direct_; }
  // Before any read, where the file system takes O_DIRECT and buffers all the same.
  void read_buffered();

  // Reads from a page's begin into a page's begin; returns the bytes that came, or -errno.
  std::int64_t read(std::int64_t from, std::int64_t bytes, std::uint8_t* to) const;

 private:
  std::string path_;
  int descriptor_;
  bool is_direct_;
  std::int64_t bytes_;
};

// One read. It, its file and its memory live until it has ended.
struct DiskRead {
  enum class State : std::uint8_t { kUnderWay, kDone, kFailed };

  const char* what = "an expert";  // for errors
  const ExpertFile* file = nullptr;
  std::int64_t from = 0, bytes = 0;  // of the file: whole pages
  std::int64_t skipped = 0, wanted = 0;  // of these bytes: those that are asked for
  std::uint8_t* to = nullptr;
  const std::uint32_t* sum = nullptr;  // CRC-32C of the wanted bytes; null: unknown
  bool is_filling = false;  // asked for by nobody: another one may follow it
  std::vector<std::uint32_t> sums;  // of the wanted bytes of each piece, where there is a sum
  std::atomic<std::int64_t> left{0};  // pieces
  std::atomic<int> error{0};  // errno, or one of the two below
  std::atomic<State> state{State::kDone};

  static constexpr int kCut = -1, kDamaged = -2;

  const std::uint8_t* data() const { return to + skipped; }
  bool has_ended() const { return state.load(std::memory_order_acquire) != State::kUnderWay; }
  std::string why() const;  // of a failed read: one sentence
};

void require_here(const HomeProcess& home);  // throws DiskError

class ReaderPool {
 public:
  // A pool is left as it is in a forked process: to end a condition waits for threads that wait for it.
  struct End {
    void operator()(ReaderPool* pool) const;
  };
  using Owner = std::unique_ptr<ReaderPool, End>;

  // A reader calls `filled` after a read that was filling has ended.
  static Owner make(int num_readers, std::int64_t piece_bytes, std::function<void()> filled = {});
  ~ReaderPool();  // after what is being read
  ReaderPool(const ReaderPool&) = delete;
  ReaderPool& operator=(const ReaderPool&) = delete;

  const HomeProcess& home() const { return home_; }

  void ask(DiskRead& read, bool is_demand);
  // Lets a read that was asked for ahead overtake others like it, since it is waited for now.
  void demand(DiskRead& read);
  // Returns when a read has ended since `seen` was `ended()`, or false after so many seconds.
  std::uint32_t ended() const { return ended_.load(std::memory_order_acquire); }
  bool wait(std::uint32_t seen, double seconds);

  // For tests: from now on every `every`th piece is cut short (kCut), damaged (kDamaged), fails with
  // this errno, or comes so much later.
  void fail(int error, std::int64_t every, double delay_seconds);

 private:
  ReaderPool(int num_readers, std::int64_t piece_bytes, std::function<void()> filled);

  struct Piece {
    DiskRead* read;
    std::int64_t from, bytes;
  };

  void close();
  void work();
  void do_piece(const Piece& piece);
  void inject_fault(const Piece& piece, std::int64_t& found);
  bool is_damaged(const DiskRead& read) const;
  void end(DiskRead& read);

  const HomeProcess home_;
  const std::int64_t piece_bytes_;
  const std::function<void()> filled_;
  std::mutex mutex_;  // of the queues
  std::condition_variable is_asked_;
  std::deque<Piece> demanded_, ahead_;
  bool is_closing_ = false;
  std::mutex ended_mutex_;
  std::condition_variable has_ended_;
  std::atomic<std::uint32_t> ended_{0};
  std::atomic<int> fault_{0};
  std::atomic<std::int64_t> fault_every_{0}, num_pieces_{0};
  std::atomic<double> fault_delay_{0.0};
  std::vector<std::thread> readers_;
};

}  // namespace tandem
