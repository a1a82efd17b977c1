// Tables on the disk of which a token reads a few rows, such as embeddings of n-grams. The pages
// around a row are read on demand, many rows at a time, bypassing the page cache. No part of a
// table stays in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "disk/reader_pool.hpp"

namespace tandem {

class RowTables {
 public:
  // Consecutive rows in a file.
  struct Part {
    std::string path;
    std::int64_t first, num_rows;  // first: offset in bytes
  };
  struct Table {
    std::vector<Part> parts;
    std::int64_t row_bytes;
  };
  struct Counts {
    std::int64_t rows = 0, read_bytes = 0;
    double waited_seconds = 0.0;
  };

  // `patience`: seconds without a row after which a call fails. Throws std::runtime_error for files
  // that are missing or too short.
  RowTables(const std::vector<Table>& tables, int num_readers, double patience);

  std::size_t num_tables() const { return tables_.size(); }
  std::int64_t row_bytes(std::size_t table) const { return tables_[table].row_bytes; }
  // Reads rows of a table in the requested order; a row that is requested several times is read
  // once. From any thread, one call at a time. Throws DiskError, and std::out_of_range for a row
  // that does not exist.
  void read(std::size_t table, std::span<const std::int64_t> rows, std::uint8_t* to);

  bool is_direct() const;
  Counts counts() const {
    require_here(home_);
    const std::lock_guard lock(mutex_);
    return counts_;
  }
  ReaderPool& readers() { return *readers_; }
  // Ends the readers; later requests are errors.
  void close();

 private:
  struct OpenPart {
    const ExpertFile* file;
    std::int64_t first, first_row;
  };
  struct OpenTable {
    std::vector<OpenPart> parts;  // sorted by first row
    std::int64_t row_bytes, num_rows = 0;
  };
  // A read and the destination of its row; null: no call waits for it.
  struct Slot {
    DiskRead read;
    std::uint8_t* wanted_at = nullptr;
  };
  struct Free {
    void operator()(std::uint8_t* memory) const;
  };

  void open(const Table& table);
  void require_rows(const OpenTable& table, std::span<const std::int64_t> rows) const;
  void read_each(const OpenTable& of, std::span<const std::int64_t> rows,
                 std::span<const std::size_t> places, std::uint8_t* to);
  void ask(Slot& slot, const OpenTable& table, std::int64_t row, std::uint8_t* to);
  void require_arrival(const OpenTable& table, std::uint32_t seen);

  const HomeProcess home_;
  std::map<std::string, ExpertFile> files_;
  std::vector<OpenTable> tables_;
  std::unique_ptr<std::uint8_t, Free> memory_;  // of the slots
  std::deque<Slot> slots_;
  const double patience_;
  Counts counts_;
  mutable std::mutex mutex_;
  ReaderPool::Owner readers_;  // null: closed; destroyed first, because readers write into slots
};

}  // namespace tandem
