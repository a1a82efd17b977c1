#include "disk/reader_pool.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__linux__)
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "crc32c.hpp"
#include "expert_source.hpp"

namespace tandem {
namespace {

// A waiting thread spins for this time before it sleeps. A piece of a read takes longer.
constexpr std::chrono::microseconds kLookOut{50};

// Pieces of likely reads under way: enough for nearly the disk's rate, and few, because a demanded
// read that comes meanwhile shares the disk with them.
constexpr int kMostLikely = 3;

int open_direct([[maybe_unused]] const char* path) {
#if defined(O_DIRECT)
  return ::open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
#else
  errno = EINVAL;
  return -1;
#endif
}

// Asks the system to run this thread as soon as it wakes, even if others compute, because it only
// needs microseconds until it waits for the disk again. From 6.12 on Linux does so for threads with
// a shorter slice. Older versions refuse, but by themselves they wake threads early that have slept
// enough.
void ask_for_short_slices() {
#if defined(__linux__) && defined(SYS_sched_setattr)
  if (::sched_getscheduler(0) != SCHED_OTHER) return;
  struct {
    std::uint32_t size, policy;
    std::uint64_t flags;
    std::int32_t nice;
    std::uint32_t priority;
    std::uint64_t slice, deadline, period;
  } wanted{};
  wanted.size = sizeof(wanted);
  wanted.nice = ::getpriority(PRIO_PROCESS, 0);
  wanted.slice = 100'000;  // nanoseconds; less than other threads have
  static_cast<void>(::syscall(SYS_sched_setattr, 0, &wanted, 0));
#endif
}

// The wanted part of a piece, as offsets in the read's memory.
std::pair<std::int64_t, std::int64_t> wanted_of(const DiskRead& read, std::int64_t from,
                                                std::int64_t bytes) {
  const std::int64_t end = read.skipped + read.wanted;
  const std::int64_t first = std::clamp(from, read.skipped, end);
  return {first, std::clamp(from + bytes, first, end)};
}

}  // namespace

void require_here(const HomeProcess& home) {
  if (!home.is_here())
    throw DiskError(
        "this process was forked from the one that loaded the model, and has none of "
        "its threads that read the disk; load the model in this process");
}

ExpertFile::ExpertFile(const std::string& path)
    : path_(path), descriptor_(open_direct(path.c_str())), is_direct_(descriptor_ >= 0), bytes_(0) {
  if (descriptor_ < 0 && errno == EINVAL) descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat found {};
  if (descriptor_ < 0 || ::fstat(descriptor_, &found) != 0)
    throw std::runtime_error(path + " cannot be opened (" + std::strerror(errno) +
                             "); restore this file of the model, and load the model again");
  bytes_ = found.st_size;
}

ExpertFile::~ExpertFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

ExpertFile::ExpertFile(ExpertFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      is_direct_(other.is_direct_),
      bytes_(other.bytes_) {}

void ExpertFile::read_buffered() {
#if defined(O_DIRECT)
  const int flags = ::fcntl(descriptor_, F_GETFL);
  if (flags >= 0) ::fcntl(descriptor_, F_SETFL, flags & ~O_DIRECT);
#endif
  is_direct_ = false;
}

std::int64_t ExpertFile::read(std::int64_t from, std::int64_t bytes, std::uint8_t* to) const {
  std::int64_t done = 0;
  while (done < bytes) {
    const ssize_t count = ::pread(descriptor_, to + done, bytes - done, from + done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return -errno;
    if (count == 0) break;  // the end of the file
    done += count;
    // Also the end: unbuffered reads cannot begin here.
    if (is_direct_ && done % kDiskPage != 0) break;
  }
#if defined(POSIX_FADV_DONTNEED)
  if (!is_direct_) ::posix_fadvise(descriptor_, from, bytes, POSIX_FADV_DONTNEED);
#endif
  return done;
}

std::string DiskRead::why() const {
  const int found = error.load(std::memory_order_relaxed);
  const std::string where = file->path() + ", byte " + std::to_string(from + skipped);
  if (found == kCut)
    return where + ": the file ends before " + std::to_string(wanted) + " bytes of " + what +
           "; it was truncated or replaced while in use: copy it again, or "
           "pack the model again";
  if (found == kDamaged)
    return where + ": " + what +
           " has other bytes than were written (its CRC-32C differs): the disk or a copy damaged "
           "the file; copy it again, or pack the model again";
  return where + ": " + what + " cannot be read (" + std::strerror(found) +
         "); check the disk, and load the model again";
}

ReaderPool::ReaderPool(int num_readers, std::int64_t piece_bytes, std::function<void()> filled)
    : piece_bytes_(std::max(kDiskPage, piece_bytes / kDiskPage * kDiskPage)),
      filled_(std::move(filled)) {
  try {
    for (int i = 0; i < std::max(1, num_readers); ++i) readers_.emplace_back([this] { work(); });
  } catch (const std::system_error& error) {
    close();
    throw std::runtime_error(std::string("cannot start a thread to read the disk (") +
                             error.what() + "); end other programs, or raise the limit of threads");
  }
}

ReaderPool::~ReaderPool() { close(); }

ReaderPool::Owner ReaderPool::make(int num_readers, std::int64_t piece_bytes,
                                   std::function<void()> filled) {
  return Owner(new ReaderPool(num_readers, piece_bytes, std::move(filled)));
}

void ReaderPool::End::operator()(ReaderPool* pool) const {
  if (pool->home_.is_here()) delete pool;
}

void ReaderPool::close() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
    demanded_.clear();
    ahead_.clear();
    likely_.clear();
  }
  has_request_.notify_all();
  for (std::thread& reader : readers_) reader.join();
}

void ReaderPool::ask(DiskRead& read, Urgency urgency) {
  const std::int64_t count = (read.bytes + piece_bytes_ - 1) / piece_bytes_;
  read.error.store(0, std::memory_order_relaxed);
  read.left.store(count, std::memory_order_relaxed);
  read.sums.assign(read.sum == nullptr ? 0 : count, 0);
  read.state.store(DiskRead::State::kUnderWay, std::memory_order_release);
  {
    const std::lock_guard lock(mutex_);
    std::deque<Piece>& queue = urgency == Urgency::kDemanded ? demanded_
                               : urgency == Urgency::kAhead  ? ahead_
                                                             : likely_;
    for (std::int64_t at = 0; at < read.bytes; at += piece_bytes_)
      queue.push_back({&read, at, std::min(piece_bytes_, read.bytes - at)});
  }
  count > 1 ? has_request_.notify_all() : has_request_.notify_one();
}

void ReaderPool::demand(DiskRead& read) {
  {
    const std::lock_guard lock(mutex_);
    const auto is_other = [&](const Piece& piece) { return piece.read != &read; };
    for (std::deque<Piece>* queue : {&ahead_, &likely_}) {
      const auto first = std::stable_partition(queue->begin(), queue->end(), is_other);
      demanded_.insert(demanded_.end(), first, queue->end());
      queue->erase(first, queue->end());
    }
  }
  has_request_.notify_all();  // readers may have left a likely read alone
}

bool ReaderPool::withdraw(DiskRead& read) {
  const std::lock_guard lock(mutex_);
  const auto is_its = [&](const Piece& piece) { return piece.read == &read; };
  const auto waiting = std::count_if(likely_.begin(), likely_.end(), is_its);
  if (waiting == 0 || waiting < read.left.load(std::memory_order_relaxed)) return false;
  std::erase_if(likely_, is_its);
  read.state.store(DiskRead::State::kFailed, std::memory_order_release);
  return true;
}

bool ReaderPool::wait(std::uint32_t seen, double seconds) {
  const auto begin = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begin < kLookOut)
    if (ended() != seen) return true;
  std::unique_lock lock(ended_mutex_);
  return has_ended_.wait_for(lock, std::chrono::duration<double>(seconds),
                             [&] { return ended() != seen; });
}

void ReaderPool::fail(int error, std::int64_t every, double delay_seconds) {
  fault_delay_ = delay_seconds;
  fault_ = error;
  fault_every_ = every;
}

void ReaderPool::work() {
  ask_for_short_slices();
  while (true) {
    Piece piece{};
    int* under_way = nullptr;
    {
      std::unique_lock lock(mutex_);
      has_request_.wait(lock, [&] { return is_closing_ || next_queue() != nullptr; });
      if (is_closing_) return;
      std::deque<Piece>& queue = *next_queue();
      piece = queue.front();
      queue.pop_front();
      under_way = &queue == &likely_ ? &num_likely_ : &num_needed_;
      ++*under_way;
    }
    do_piece(piece);
    const std::lock_guard lock(mutex_);
    --*under_way;
    if (!likely_.empty()) has_request_.notify_one();
  }
}

// Returns the queue of the next piece to read; null: none may begin. Likely reads wait until no
// needed one is under way.
std::deque<ReaderPool::Piece>* ReaderPool::next_queue() {
  if (!demanded_.empty()) return &demanded_;
  if (!ahead_.empty()) return &ahead_;
  const bool is_idle = num_needed_ == 0 && num_likely_ < kMostLikely;
  return is_idle && !likely_.empty() ? &likely_ : nullptr;
}

void ReaderPool::inject_fault(const Piece& piece, std::int64_t& found) {
  const std::int64_t every = fault_every_.load(std::memory_order_relaxed);
  if (every <= 0 || ++num_pieces_ % every != 0) return;
  const int fault = fault_;
  std::this_thread::sleep_for(std::chrono::duration<double>(fault_delay_.load()));
  if (fault == DiskRead::kCut) found = 0;
  if (fault == DiskRead::kDamaged) piece.read->to[piece.from + piece.bytes / 2] ^= 1;
  if (fault > 0) found = -fault;
}

// Checksums are per piece, so besides the disk a read waits only for its last piece's checksum.
void ReaderPool::do_piece(const Piece& piece) {
  DiskRead& read = *piece.read;
  std::int64_t found = read.file->read(read.from + piece.from, piece.bytes, read.to + piece.from);
  inject_fault(piece, found);
  // Nothing is wanted beyond the end of the file, where reads end.
  const std::int64_t end_wanted = read.skipped + read.wanted;
  if (found < std::min(piece.bytes, end_wanted - piece.from))
    read.error.store(found < 0 ? static_cast<int>(-found) : DiskRead::kCut,
                     std::memory_order_relaxed);
  else if (read.sum != nullptr) {
    const auto [first, last] = wanted_of(read, piece.from, piece.bytes);
    read.sums[piece.from / piece_bytes_] = crc32c(read.to + first, last - first);
  }
  if (read.left.fetch_sub(1, std::memory_order_acq_rel) == 1) end(read);
}

bool ReaderPool::is_damaged(const DiskRead& read) const {
  std::uint32_t sum = 0;  // the checksum of no bytes
  for (std::size_t i = 0; i < read.sums.size(); ++i) {
    const std::int64_t from = static_cast<std::int64_t>(i) * piece_bytes_;
    const auto [first, last] = wanted_of(read, from, piece_bytes_);
    sum = join_crc32c(sum, read.sums[i], last - first);
  }
  return sum != *read.sum;
}

void ReaderPool::end(DiskRead& read) {
  if (read.error.load(std::memory_order_relaxed) == 0 && read.sum != nullptr && is_damaged(read))
    read.error.store(DiskRead::kDamaged, std::memory_order_relaxed);
  const bool is_good = read.error.load(std::memory_order_relaxed) == 0;
  // Read first, because the slot may soon belong to another expert.
  const bool is_filling = read.is_filling;
  read.state.store(is_good ? DiskRead::State::kDone : DiskRead::State::kFailed,
                   std::memory_order_release);
  {
    const std::lock_guard lock(ended_mutex_);
    ended_.fetch_add(1, std::memory_order_acq_rel);
  }
  has_ended_.notify_all();
  if (is_filling) filled_();
}

}  // namespace tandem
