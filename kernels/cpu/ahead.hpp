// Fetching what is read next, a line at a time between other work: a burst of prefetches fills the queue of outstanding reads and stops
// the core.
#pragma once
#include <cstdint>
#include <vector>

#include "interface.hpp"

namespace {

using namespace bitkv;

constexpr int64_t LINE_BYTES = 64;

class Ahead {
public:
    // The scanned fields of the pages of one granule and head; `record` is that of the first page, or null.
    void scan(const Layout& layout, const uint8_t* record, int64_t page_stride) {
        finish();
        page_stride_ = page_stride, at_ = record_ = record, pages_ = record ? layout.pages : 0;
        // A record begins with planes and all scales and ends with the centroids; what lies between, if anything, are the low bits. Of the
        // full scales of a page refinement reads a few, which touch nearly all of their lines.
        field_bytes_ = layout.record_bytes;
        for (Side side : {VALUES, KEYS}) {
            if (layout.bits[side] == layout.scan_bits[side] || field_bytes_ < layout.record_bytes) continue;
            field_bytes_ = layout.full[side] + 2 * layout.tokens;
            const int64_t first = layout.centroid[KEYS], bytes = layout.record_bytes - first;
            expect(pages_, bytes);
            for (int64_t page = 0; page < pages_; ++page) add(record + page * page_stride + first, bytes);
        }
    }

    // Makes room for `parts` more of what is added, of up to `bytes` bytes each.
    void expect(int64_t parts, int64_t bytes) {
        const size_t most = count_ + size_t(parts * (bytes / LINE_BYTES + 2));
        if (lines_.size() < most) lines_.resize(most);
    }

    // Some bytes anywhere.
    void add(const uint8_t* from, int64_t bytes) {
        for (; bytes > LINE_BYTES; from += LINE_BYTES, bytes -= LINE_BYTES) lines_[count_++] = from;
        const uint8_t* last = from + bytes - 1;
        lines_[count_] = from, lines_[count_ + 1] = last;  // without a branch that nobody can foresee
        count_ += 1 + (uintptr_t(from) / LINE_BYTES != uintptr_t(last) / LINE_BYTES);
    }

    // Where the next `lines` lines of the scan lie, for a loop that has no room for a call to ask for them itself. They may reach beyond a
    // field, which does no harm; null if there is nothing left.
    const uint8_t* take(int64_t lines) {
        if (!pages_) return nullptr;
        const uint8_t* from = at_;
        at_ += lines * LINE_BYTES;
        if (at_ >= record_ + field_bytes_ && --pages_) at_ = record_ += page_stride_;
        return from;
    }

    // As above; `other`, which is at hand, if there is nothing left.
    const uint8_t* take(int64_t lines, const uint8_t* other) {
        const uint8_t* from = take(lines);
        return from ? from : other;
    }

    // Asks for the next `lines` lines of the scan.
    void walk(int64_t lines) {
        for (; lines && pages_; --lines) __builtin_prefetch(take(1), 0, 2);
    }

    // Asks for some of the lines that were added.
    void step(size_t lines) {
        for (const size_t last = count_ - next_ < lines ? count_ : next_ + lines; next_ < last; ++next_) __builtin_prefetch(lines_[next_], 0, 2);
    }

    // Asks for what is left of both.
    void finish() {
        while (pages_) __builtin_prefetch(take(1), 0, 2);
        step(count_);
        count_ = next_ = 0;
    }

private:
    int64_t page_stride_ = 0, field_bytes_ = 0, pages_ = 0;
    const uint8_t *record_ = nullptr, *at_ = nullptr;
    std::vector<const uint8_t*> lines_;
    size_t next_ = 0, count_ = 0;
};

}  // namespace
