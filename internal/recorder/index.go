package recorder

import "reflect"

// ways is how many entries of the index a device may be in.
const ways = 16

// entry is a device with records.
type entry struct {
	high, low uint32    // the device's hash; both 0: free
	last      [2]uint32 // positions of its newest records of ringProven and ringOther, low 32 bits
	at        uint32    // seconds since the start, of spent and spentCalls
	// spent and spentCalls are how many records of each burst the device has used.
	spent      [2]uint8
	spentCalls uint16
}

const firstSets = 8

var entryBytes = int64(reflect.TypeFor[entry]().Size())

// index finds the newest record of a device. It doubles up to a limit; then a device
// takes the place of the one whose newest record is oldest.
type index struct {
	entries []entry // sets of ways
	most    int
}

func newIndex(bytes int64) index {
	most := firstSets * ways
	for int64(most)*2*entryBytes <= bytes {
		most *= 2
	}
	return index{most: most}
}

// set returns the entries in which a device may be.
func (x *index) set(hash uint64) []entry {
	begin := int(hash>>shardBits) & (len(x.entries)/ways - 1) * ways
	return x.entries[begin : begin+ways]
}

// place is the i-th place in its set where a device is looked for: most are at the first,
// in one cache line.
func place(hash uint64, i int) int { return (int(hash>>60) + i) % ways }

// get returns the entry of a device, nil if it has none.
func (x *index) get(hash uint64) *entry {
	if x.entries == nil {
		return nil
	}
	set := x.set(hash)
	for i := range set {
		if e := &set[place(hash, i)]; e.low == uint32(hash) && e.high == uint32(hash>>32) {
			return e
		}
	}
	return nil
}

// add returns a new entry for a device that has none. age returns how old the newest
// record of an entry is; ok is false if the entry has none. grown is how many bytes were
// allocated.
func (x *index) add(hash uint64, age func(*entry) (age uint64, ok bool)) (e *entry, grown int64) {
	if x.entries == nil {
		x.entries = make([]entry, firstSets*ways)
		grown = int64(len(x.entries)) * entryBytes
	}
	for {
		var oldest *entry
		var most uint64
		set := x.set(hash)
		for i := range set {
			e := &set[place(hash, i)]
			old, ok := age(e)
			if !ok || e.low == 0 && e.high == 0 {
				*e = entry{high: uint32(hash >> 32), low: uint32(hash)}
				return e, grown
			}
			if old >= most {
				oldest, most = e, old
			}
		}
		if len(x.entries) >= x.most {
			*oldest = entry{high: uint32(hash >> 32), low: uint32(hash)}
			return oldest, grown
		}
		grown += x.double(age)
	}
}

// double makes the index twice as large. Each set is divided, so no entry is lost.
func (x *index) double(age func(*entry) (age uint64, ok bool)) (grown int64) {
	old := x.entries
	x.entries = make([]entry, 2*len(old))
	for i := range old {
		e := old[i]
		if _, ok := age(&e); !ok {
			continue
		}
		hash := uint64(e.high)<<32 | uint64(e.low)
		set := x.set(hash)
		for i := range set {
			if to := &set[place(hash, i)]; to.low == 0 && to.high == 0 {
				*to = e
				break
			}
		}
	}
	return int64(len(old)) * entryBytes
}
