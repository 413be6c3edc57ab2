package udpaudio

// windowSize is how far below the highest sequence number a packet may be and still be
// distinguished from a replay (RFC 6479).
const windowSize = 64

// window records which of the latest sequence numbers were accepted. The zero value has
// accepted none. Sequence numbers do not wrap.
type window struct {
	high     uint32
	accepted uint64 // bit i is for high-1-i
}

// place is the position of a sequence number relative to the window.
type place uint8

const (
	ahead  place = iota // above the highest
	inside              // below it and not accepted yet
	accepted
	below // below the window
)

// place returns the position of seq, and for ahead the distance.
func (w *window) place(seq uint32) (place, uint32) {
	if seq > w.high {
		return ahead, seq - w.high
	}
	switch d := w.high - seq; {
	case d == 0:
		return accepted, 0
	case d > windowSize:
		return below, 0
	case w.accepted&(1<<(d-1)) != 0:
		return accepted, 0
	}
	return inside, 0
}

// accept marks seq as accepted; it must be ahead or inside.
func (w *window) accept(seq uint32) {
	if seq < w.high {
		w.accepted |= 1 << (w.high - seq - 1)
		return
	}
	d := seq - w.high // shifts of 64 and more give 0
	w.accepted = w.accepted<<d | 1<<(d-1)
	w.high = seq
}

// merge adds the accepted numbers of an older window, which must be below this one.
func (w *window) merge(old window) {
	d := w.high - old.high
	w.accepted |= old.accepted<<d | 1<<(d-1)
}
