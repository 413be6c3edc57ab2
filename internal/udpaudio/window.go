package udpaudio

// windowSize is how far behind the highest sequence a packet may come and
// still be told from a replay (RFC 6479).
const windowSize = 64

// window remembers which of the latest sequences were taken. The zero value
// has taken none. Sequences do not wrap.
type window struct {
	high uint32
	seen uint64 // bit i stands for high-1-i
}

// place says where a sequence lies.
type place uint8

const (
	ahead  place = iota // above the highest
	inside              // below it and not taken yet
	taken
	behind // below the window
)

// place returns where seq lies and, for ahead, how far.
func (w *window) place(seq uint32) (place, uint32) {
	if seq > w.high {
		return ahead, seq - w.high
	}
	switch d := w.high - seq; {
	case d == 0:
		return taken, 0
	case d > windowSize:
		return behind, 0
	case w.seen&(1<<(d-1)) != 0:
		return taken, 0
	}
	return inside, 0
}

// take marks seq, which must be ahead or inside.
func (w *window) take(seq uint32) {
	if seq < w.high {
		w.seen |= 1 << (w.high - seq - 1)
		return
	}
	d := seq - w.high // shifts of 64 and more give 0
	w.seen = w.seen<<d | 1<<(d-1)
	w.high = seq
}

// merge adds what an older window below this one took.
func (w *window) merge(old window) {
	d := w.high - old.high
	w.seen |= old.seen<<d | 1<<(d-1)
}
