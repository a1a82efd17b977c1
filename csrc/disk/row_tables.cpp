#include "disk/row_tables.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "expert_source.hpp"

namespace tandem {
namespace {

// Rows under way at a time: enough to fill a disk's queue while some of them are copied.
constexpr std::size_t kRowsAtOnce = 64;

// The most bytes that a row occupies, whatever its offset.
std::int64_t most_bytes(const std::vector<RowTables::Table>& tables) {
  std::int64_t most = 0;
  for (const RowTables::Table& table : tables) most = std::max(most, table.row_bytes);
  return whole_pages(most) + kDiskPage;
}

}  // namespace

void RowTables::Free::operator()(std::uint8_t* memory) const { std::free(memory); }

RowTables::RowTables(const std::vector<Table>& tables, int num_readers, double patience)
    : memory_(static_cast<std::uint8_t*>(
          std::aligned_alloc(kDiskPage, kRowsAtOnce * most_bytes(tables)))),
      slots_(kRowsAtOnce),
      patience_(patience),
      readers_(ReaderPool::make(num_readers, most_bytes(tables))) {
  if (memory_ == nullptr) throw std::bad_alloc();
  for (std::size_t i = 0; i < slots_.size(); ++i)
    slots_[i].read.to = memory_.get() + i * most_bytes(tables);
  for (const Table& table : tables) open(table);
}

void RowTables::open(const Table& table) {
  OpenTable& opened = tables_.emplace_back();
  opened.row_bytes = table.row_bytes;
  for (const Part& part : table.parts) {
    auto found = files_.find(part.path);
    if (found == files_.end()) found = files_.emplace(part.path, ExpertFile(part.path)).first;
    const std::int64_t end = part.first + part.num_rows * table.row_bytes;
    if (found->second.bytes() < end)
      throw std::runtime_error(part.path + " has " + std::to_string(found->second.bytes()) +
                               " bytes, expected " + std::to_string(end) +
                               " or more; copy it again, or pack the model again");
    opened.parts.push_back({&found->second, part.first, opened.num_rows});
    opened.num_rows += part.num_rows;
  }
}

bool RowTables::is_direct() const {
  return std::all_of(files_.begin(), files_.end(),
                     [](const auto& file) { return file.second.is_direct(); });
}

void RowTables::read(std::size_t table, std::span<const std::int64_t> rows, std::uint8_t* to) {
  require_here(home_);
  const std::lock_guard lock(mutex_);
  const OpenTable& of = tables_.at(table);
  require_rows(of, rows);
  if (!readers_) throw DiskError("the model has been closed; load it again");
  // Positions sorted by row: a prompt's tokens repeat, and each row is read once, to its first
  // position.
  std::vector<std::size_t> places(rows.size());
  std::iota(places.begin(), places.end(), 0);
  std::stable_sort(places.begin(), places.end(),
                   [&](std::size_t a, std::size_t b) { return rows[a] < rows[b]; });
  const auto is_same = [&](std::size_t a, std::size_t b) { return rows[a] == rows[b]; };
  std::vector<std::size_t> firsts;
  std::unique_copy(places.begin(), places.end(), std::back_inserter(firsts), is_same);
  read_each(of, rows, firsts, to);
  std::size_t first = 0;
  for (const std::size_t place : places) {
    if (rows[place] != rows[firsts[first]]) ++first;
    if (place != firsts[first])
      std::memcpy(to + place * of.row_bytes, to + firsts[first] * of.row_bytes, of.row_bytes);
  }
  counts_.rows += static_cast<std::int64_t>(rows.size());
}

// Reads the rows at some positions, as many at a time as there are slots.
void RowTables::read_each(const OpenTable& of, std::span<const std::int64_t> rows,
                          std::span<const std::size_t> places, std::uint8_t* to) {
  std::size_t num_requested = 0, num_come = 0;
  try {
    while (num_come < places.size()) {
      const std::uint32_t seen = readers_->ended();
      bool has_moved = false;
      for (Slot& slot : slots_) {
        if (!slot.read.has_ended()) continue;  // may still be a read of a failed call
        if (slot.wanted_at != nullptr) {
          if (slot.read.state == DiskRead::State::kFailed) throw DiskError(slot.read.why());
          std::memcpy(slot.wanted_at, slot.read.data(), of.row_bytes);
          slot.wanted_at = nullptr;
          ++num_come;
          has_moved = true;
        }
        if (num_requested < places.size()) {
          const std::size_t place = places[num_requested++];
          ask(slot, of, rows[place], to + place * of.row_bytes);
          has_moved = true;
        }
      }
      if (!has_moved) require_arrival(of, seen);
    }
  } catch (...) {
    for (Slot& slot : slots_) slot.wanted_at = nullptr;
    throw;
  }
}

void RowTables::close() {
  const std::lock_guard lock(mutex_);
  readers_.reset();
}

void RowTables::require_rows(const OpenTable& table, std::span<const std::int64_t> rows) const {
  for (const std::int64_t row : rows)
    if (row < 0 || row >= table.num_rows)
      throw std::out_of_range("row " + std::to_string(row) + " of a table of " +
                              std::to_string(table.num_rows) + " rows");
}

void RowTables::ask(Slot& slot, const OpenTable& table, std::int64_t row, std::uint8_t* to) {
  const auto part = std::prev(
      std::upper_bound(table.parts.begin(), table.parts.end(), row,
                       [](std::int64_t wanted, const OpenPart& one) { return wanted < one.first_row; }));
  const std::int64_t at = part->first + (row - part->first_row) * table.row_bytes;
  DiskRead& read = slot.read;
  read.what = "a row";
  read.file = part->file;
  read.from = at / kDiskPage * kDiskPage;
  read.skipped = at - read.from;
  read.wanted = table.row_bytes;
  read.bytes = whole_pages(read.skipped + read.wanted);
  slot.wanted_at = to;
  counts_.read_bytes += read.bytes;
  readers_->ask(read, Urgency::kDemanded);
}

void RowTables::require_arrival(const OpenTable& table, std::uint32_t seen) {
  const auto begin = std::chrono::steady_clock::now();
  const bool has_come = readers_->wait(seen, patience_);
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
  counts_.waited_seconds += waited.count();
  if (!has_come)
    throw DiskError(table.parts.front().file->path() + " delivered no row for " +
                    std::to_string(static_cast<std::int64_t>(patience_)) +
                    " seconds; check the disk, and send the request again");
}

}  // namespace tandem
