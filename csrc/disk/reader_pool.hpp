// Threads that read parts of files into memory, bypassing the page cache if possible. A read is
// split into pieces, so that a single one fills a disk's queue. Demanded reads come first, then those
// that will be needed later. Those that may be needed are made while the disk is idle.
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

constexpr std::int64_t kDiskPage = 4096;  // alignment of unbuffered reads

constexpr std::int64_t whole_pages(std::int64_t bytes) {
  return (bytes + kDiskPage - 1) / kDiskPage * kDiskPage;
}

// A file that stays open. The constructor throws std::runtime_error with the path and the reason.
class ExpertFile {
 public:
  explicit ExpertFile(const std::string& path);
  ~ExpertFile();
  ExpertFile(ExpertFile&& other) noexcept;
  ExpertFile(const ExpertFile&) = delete;
  ExpertFile& operator=(const ExpertFile&) = delete;

  const std::string& path() const { return path_; }
  std::int64_t bytes() const { return bytes_; }
  // Whether reads bypass the page cache. If the file system refuses that, pages are dropped after
  // reading.
  bool is_direct() const { return is_direct_; }
  // Call it before the first read if the file system accepts O_DIRECT but buffers anyway.
  void read_buffered();

  // Reads from a page boundary to a page boundary; returns the number of bytes read, or -errno.
  std::int64_t read(std::int64_t from, std::int64_t bytes, std::uint8_t* to) const;

 private:
  std::string path_;
  int descriptor_;
  bool is_direct_;
  std::int64_t bytes_;
};

// One read. It, its file and its memory must live until it has ended.
struct DiskRead {
  enum class State : std::uint8_t { kUnderWay, kDone, kFailed };

  const char* what = "an expert";  // for errors
  const ExpertFile* file = nullptr;
  std::int64_t from = 0, bytes = 0;  // range in the file: whole pages
  std::int64_t skipped = 0, wanted = 0;  // the wanted part of these bytes
  std::uint8_t* to = nullptr;
  const std::uint32_t* sum = nullptr;  // CRC-32C of the wanted bytes; null: unknown
  bool is_filling = false;  // not requested by a use; another filling read may follow it
  std::vector<std::uint32_t> sums;  // of the wanted bytes of each piece, if there is a checksum
  std::atomic<std::int64_t> left{0};  // pieces that are left
  std::atomic<int> error{0};  // errno, or one of the two values below
  std::atomic<State> state{State::kDone};

  static constexpr int kCut = -1, kDamaged = -2;

  const std::uint8_t* data() const { return to + skipped; }
  bool has_ended() const { return state.load(std::memory_order_acquire) != State::kUnderWay; }
  std::string why() const;  // a sentence about a failed read
};

void require_here(const HomeProcess& home);  // throws DiskError

// A use waits for the read; a later use will need it; or a later use may need it.
enum class Urgency : std::uint8_t { kDemanded, kAhead, kLikely };

class ReaderPool {
 public:
  // A forked process does not destroy its pool, because a condition variable's destructor would
  // wait for threads that do not exist there.
  struct End {
    void operator()(ReaderPool* pool) const;
  };
  using Owner = std::unique_ptr<ReaderPool, End>;

  // A reader calls `filled` after a filling read has ended.
  static Owner make(int num_readers, std::int64_t piece_bytes, std::function<void()> filled = {});
  ~ReaderPool();  // waits for reads that have begun
  ReaderPool(const ReaderPool&) = delete;
  ReaderPool& operator=(const ReaderPool&) = delete;

  const HomeProcess& home() const { return home_; }

  void ask(DiskRead& read, Urgency urgency);
  // Moves a read that was made ahead to the demanded ones, because a use now waits for it.
  void demand(DiskRead& read);
  // Ends a likely read as failed; returns false if a piece of it is under way, or none is left.
  bool withdraw(DiskRead& read);
  // Returns when a read has ended since `seen` was `ended()`, or false after this time.
  std::uint32_t ended() const { return ended_.load(std::memory_order_acquire); }
  bool wait(std::uint32_t seen, double seconds);

  // For tests: from now on every `every`th piece is cut short (kCut), damaged (kDamaged), fails
  // with this errno, or is delayed.
  void fail(int error, std::int64_t every, double delay_seconds);

 private:
  ReaderPool(int num_readers, std::int64_t piece_bytes, std::function<void()> filled);

  struct Piece {
    DiskRead* read;
    std::int64_t from, bytes;
  };

  void close();
  void work();
  std::deque<Piece>* next_queue();
  void do_piece(const Piece& piece);
  void inject_fault(const Piece& piece, std::int64_t& found);
  bool is_damaged(const DiskRead& read) const;
  void end(DiskRead& read);

  const HomeProcess home_;
  const std::int64_t piece_bytes_;
  const std::function<void()> filled_;
  std::mutex mutex_;  // guards the queues
  std::condition_variable has_request_;
  std::deque<Piece> demanded_, ahead_, likely_;
  int num_needed_ = 0, num_likely_ = 0;  // pieces under way: needed at some time; of likely reads
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
