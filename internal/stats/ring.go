package stats

import (
	"math"
	"time"
)

// sample is what a node did and was in one slot of a tier.
type sample struct {
	slot    int32  // number of the slot since 1970; 0: empty
	covered uint32 // milliseconds
	counts  [numSummed]uint32
	gauges  [numGauges]uint32 // means
}

// sum adds up samples.
type sum struct {
	slot    int64
	covered uint64 // milliseconds
	counts  [numSummed]uint64
	gauges  [numGauges]uint64 // multiplied with milliseconds
}

func (a *sum) add(b *sum) {
	a.covered += b.covered
	for i := range a.counts {
		a.counts[i] += b.counts[i]
	}
	for i := range a.gauges {
		a.gauges[i] += b.gauges[i]
	}
}

func (a *sum) addSample(s *sample) {
	a.covered += uint64(s.covered)
	for i, n := range s.counts {
		a.counts[i] += uint64(n)
	}
	for i, n := range s.gauges {
		a.gauges[i] += uint64(n) * uint64(s.covered)
	}
}

func (a *sum) sample() (s sample) {
	s.slot, s.covered = int32(a.slot), uint32(min(a.covered, math.MaxUint32))
	for i, n := range a.counts {
		s.counts[i] = uint32(min(n, math.MaxUint32))
	}
	for i, n := range a.gauges {
		s.gauges[i] = uint32(min(n/max(a.covered, 1), math.MaxUint32))
	}
	return s
}

// chunkSlots is how many samples are allocated at once, about 120 KiB.
const chunkSlots = 360

// ring keeps the samples of the newest slots of a tier. Its memory grows with its age, to one sample a slot.
type ring struct {
	seconds int64 // of a slot
	slots   int64
	open    sum // of the newest slot
	chunks  []*[chunkSlots]sample
}

func newRing(step, span time.Duration) ring {
	slots := int64(span / step)
	return ring{seconds: int64(step / time.Second), slots: slots, chunks: make([]*[chunkSlots]sample, (slots+chunkSlots-1)/chunkSlots)}
}

// add adds what happened in a slot to it.
func (r *ring) add(slot int64, s *sum) {
	if r.open.slot != slot {
		r.open = sum{slot: slot}
	}
	r.open.add(s)
	i := slot % r.slots
	chunk := &r.chunks[i/chunkSlots]
	if *chunk == nil {
		*chunk = new([chunkSlots]sample)
	}
	(*chunk)[i%chunkSlots] = r.open.sample()
}

// at returns the sample of a slot, nil if there is none.
func (r *ring) at(slot int64) *sample {
	i := slot % r.slots
	chunk := r.chunks[i/chunkSlots]
	if chunk == nil || int64(chunk[i%chunkSlots].slot) != slot {
		return nil
	}
	return &chunk[i%chunkSlots]
}
