package registry

import "math/bits"

// table maps hashes to records: open addressing with linear probing, between 68 and 85 %
// full, so that a device takes 20 to 25 bytes. A Go map takes 56.
type table struct {
	n      int
	hashes []uint64
	client []uint64
	flags  []uint8 // with flagUsed where there is a record
}

// home returns the slot where the search for a hash starts. The low bits select the shard.
func (t *table) home(h uint64) int {
	high, _ := bits.Mul64(h, uint64(len(t.flags)))
	return int(high)
}

func (t *table) next(i int) int {
	if i++; i < len(t.flags) {
		return i
	}
	return 0
}

// find returns the slot of a hash, or the slot to insert it.
func (t *table) find(h uint64) (i int, found bool) {
	if len(t.flags) == 0 {
		return 0, false
	}
	for i = t.home(h); t.flags[i]&flagUsed != 0; i = t.next(i) {
		if t.hashes[i] == h {
			return i, true
		}
	}
	return i, false
}

func (t *table) at(i int) record { return record{t.client[i], t.flags[i] &^ flagUsed} }

func (t *table) set(i int, r record) { t.client[i], t.flags[i] = r.client, r.flags|flagUsed }

// insert adds a hash that the table does not contain.
func (t *table) insert(h uint64, r record) {
	if (t.n+1)*20 > len(t.flags)*17 {
		t.resize(len(t.flags) + len(t.flags)/4 + 16)
	}
	i, _ := t.find(h)
	t.hashes[i] = h
	t.set(i, r)
	t.n++
}

// remove empties a slot, and moves following records that the gap would make unreachable.
func (t *table) remove(i int) {
	t.n--
	for j := t.next(i); t.flags[j]&flagUsed != 0; j = t.next(j) {
		home := t.home(t.hashes[j])
		if i < j && i < home && home <= j || j < i && (i < home || home <= j) {
			continue // it is found without crossing the gap
		}
		t.hashes[i], t.client[i], t.flags[i] = t.hashes[j], t.client[j], t.flags[j]
		i = j
	}
	t.flags[i] = 0
}

func (t *table) resize(slots int) {
	old := *t
	*t = table{n: old.n, hashes: make([]uint64, slots), client: make([]uint64, slots), flags: make([]uint8, slots)}
	for k, flags := range old.flags {
		if flags&flagUsed != 0 {
			i, _ := t.find(old.hashes[k])
			t.hashes[i], t.client[i], t.flags[i] = old.hashes[k], old.client[k], flags
		}
	}
}
