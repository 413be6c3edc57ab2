package firmware

import "sort"

// idSet remembers which call ids a device has executed, as sorted ranges: servers count upwards, so a million ids are a
// handful of ranges.
type idSet struct{ ranges []idRange }

type idRange struct{ lo, hi int32 }

// add notes id and reports whether it was new.
func (s *idSet) add(id int32) bool {
	r := s.ranges
	// First range that begins after id.
	i := len(r)
	if i > 0 && r[i-1].lo > id {
		i = sort.Search(len(r), func(k int) bool { return r[k].lo > id })
	}
	if i > 0 && id <= r[i-1].hi {
		return false
	}
	joinsLeft := i > 0 && int64(r[i-1].hi)+1 == int64(id)
	joinsRight := i < len(r) && int64(id)+1 == int64(r[i].lo)
	switch {
	case joinsLeft && joinsRight:
		r[i-1].hi = r[i].hi
		s.ranges = append(r[:i], r[i+1:]...)
	case joinsLeft:
		r[i-1].hi = id
	case joinsRight:
		r[i].lo = id
	default:
		r = append(r, idRange{})
		copy(r[i+1:], r[i:])
		r[i] = idRange{id, id}
		s.ranges = r
	}
	return true
}
