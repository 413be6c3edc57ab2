package recorder

// slot is the unit of records, in bytes.
const slot = 16

// chunkSlots is how many slots are allocated and given up at once: 4 KiB. It is more than
// the largest record has.
const chunkSlots = 256

// ring holds records of one or more slots, the newest in place of the oldest. A position
// is a slot counted since the start; its low 32 bits are kept in records.
type ring struct {
	chunks [][]byte // allocated when they are reached
	first  []uint64 // of each chunk, the position of the first record that begins in it
	slots  uint64
	next   uint64 // position of the next record
	oldest uint64 // position of the oldest record
}

// newRing returns a ring of at most this many bytes, and of two chunks at least.
func newRing(bytes int64) ring {
	n := max(2, bytes/(slot*chunkSlots))
	return ring{chunks: make([][]byte, n), first: make([]uint64, n), slots: uint64(n) * chunkSlots}
}

// write appends a record, whose length is a multiple of slot. It returns its position,
// and how many bytes it allocated.
func (r *ring) write(record []byte) (pos uint64, allocated int64) {
	pos = r.next
	r.next += uint64(len(record) / slot)
	if begins := (pos + chunkSlots - 1) / chunkSlots; begins*chunkSlots < r.next { // it reaches another chunk
		allocated = r.enter(begins, pos)
	}
	for p := pos; p < r.next; p++ {
		copy(r.at(p), record)
		record = record[slot:]
	}
	return pos, allocated
}

// enter gives up the records of a chunk for the record at pos.
func (r *ring) enter(number, pos uint64) (allocated int64) {
	n := uint64(len(r.chunks))
	if r.chunks[number%n] == nil {
		r.chunks[number%n] = make([]byte, slot*chunkSlots)
		allocated = slot * chunkSlots
	}
	if r.first[number%n] = pos; pos < number*chunkSlots {
		r.first[number%n] = r.next
	}
	if number >= n {
		r.oldest = r.first[(number+1)%n]
	}
	return allocated
}

// at returns the slot at a position.
func (r *ring) at(pos uint64) []byte {
	at := pos % r.slots
	return r.chunks[at/chunkSlots][at%chunkSlots*slot:][:slot]
}

// read appends the record at a position to dst.
func (r *ring) read(dst []byte, pos uint64) []byte {
	n := uint64(r.at(pos)[offSlots])
	for i := range n {
		dst = append(dst, r.at(pos+i)...)
	}
	return dst
}

// clear overwrites the record at a position. Its place stays taken by a record of no kind
// and no device.
func (r *ring) clear(pos uint64) {
	for i := range uint64(r.at(pos)[offSlots]) {
		at := r.at(pos + i)
		if i > 0 {
			clear(at)
			continue
		}
		at[offKind] = 0
		clear(at[offFlags:])
	}
}

// resolve returns the position with these low 32 bits, if its record is still there.
func (r *ring) resolve(low uint32) (pos uint64, ok bool) {
	back := uint32(r.next) - low
	if back == 0 || uint64(back) > r.next-r.oldest {
		return 0, false
	}
	return r.next - uint64(back), true
}

// peek reads where the next record will be written, if that is allocated, so that the
// processor fetches it while the record is made: this is a third of the time of a record.
func (r *ring) peek() byte {
	at := r.next % r.slots
	if c := r.chunks[at/chunkSlots]; c != nil {
		return c[at%chunkSlots*slot]
	}
	return 0
}
