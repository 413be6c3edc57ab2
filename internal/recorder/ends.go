package recorder

import (
	"encoding/binary"
	"net/netip"
	"time"

	"fleetd/internal/devices"
)

// clockSlack is how much later a record may be written than it is stamped.
const clockSlack = time.Second

// Ended returns how many devices had ends like these, and how many of them from an address. A
// device counts once.
func (r *Recorder) Ended(q devices.Ends, remote netip.Addr) (all, there int) {
	for i := range r.shards {
		n, m := r.endedIn(&r.shards[i], q, remote)
		all, there = all+n, there+m
	}
	return all, there
}

// endedIn is Ended for a shard.
func (r *Recorder) endedIn(s *shard, q devices.Ends, remote netip.Addr) (all, there int) {
	_, except := r.shard(q.Except)
	s.mu.Lock()
	defer s.mu.Unlock()
	seen := map[uint32]bool{uint32(except): true}
	var buf []byte
	ring := &s.steps[ringProven]
	for pos := r.firstSince(ring, q.From.Add(-clockSlack)); pos < ring.next; pos += uint64(len(buf) / slot) {
		buf = ring.read(buf[:0], pos)
		if r.timeOf(buf).After(q.To.Add(clockSlack)) {
			break
		}
		check := binary.LittleEndian.Uint32(buf[offCheck:])
		if buf[offKind] != kinds[devices.StepClosed] || seen[check] {
			continue
		}
		if step := r.readStep("", buf); q.Match(&step) {
			seen[check] = true
			all++
			if step.Remote == remote {
				there++
			}
		}
	}
	return all, there
}

// EndedOf is Ended for some devices.
func (r *Recorder) EndedOf(ids []devices.ID, q devices.Ends, remote netip.Addr) (all, there int) {
	for _, id := range ids {
		if id == q.Except {
			continue
		}
		for _, step := range r.Steps(id, true, devices.StepClosed, devices.LogPosition{At: q.To.Add(time.Millisecond)}, stepBurst) {
			if q.Match(&step) {
				all++
				if step.Remote == remote {
					there++
				}
				break
			}
		}
	}
	return all, there
}

// firstSince returns the position of a record at or before the first one since a time: of
// the first record of a chunk.
func (r *Recorder) firstSince(s *ring, since time.Time) uint64 {
	pos := s.oldest
	for number, n := s.next/chunkSlots, uint64(len(s.chunks)); number*chunkSlots > s.oldest; number-- {
		first := s.first[number%n]
		if first <= s.oldest || first >= s.next || first/chunkSlots != number {
			continue // no record begins in this chunk yet, or it has the oldest one
		}
		if r.timeOf(s.at(first)).Before(since) {
			pos = first
			break
		}
	}
	return pos
}
