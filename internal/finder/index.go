// Package finder finds devices by words, as people and language models use them:
// `lamp in the kitchen`, `2nd floor lamps`, `kichen lamp`, `厨房的灯`. Words are
// looked up in the name, the labels, the board and the tools of each device.
//
// It is an index in memory. Its owner adds the devices, and decides for each search which
// of them the caller may see.
package finder

import (
	"cmp"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// Doc contains the searched data of one device.
type Doc struct {
	ID, Name, Board string
	Labels          map[string]string
	List            string // names its list of tools; empty: none is known
}

func (d *Doc) equal(o *Doc) bool {
	if d.ID != o.ID || d.Name != o.Name || d.Board != o.Board || d.List != o.List || len(d.Labels) != len(o.Labels) {
		return false
	}
	for k, v := range d.Labels {
		if w, ok := o.Labels[k]; !ok || v != w {
			return false
		}
	}
	return true
}

// Tool is one tool of a list, which many devices share.
type Tool struct {
	Name, Description string
	UserOnly          bool
}

// Index is a search index of devices. It is safe for concurrent use.
type Index struct {
	mu    sync.RWMutex
	slots []slot // in the order in which they were added
	dead  int
	byID  map[string]int32
	names map[string][]int32 // by folded name
	words map[string]*postings
	lists map[string]*list
}

// slot contains one version of a device; a changed device gets a new slot.
type slot struct {
	doc  *Doc
	gone bool
}

// postings are the slots in which a word occurs.
type postings struct {
	named []int32 // in the name, a label's key or value, or an id that is a word
	aside []int32 // in the board
	tools []toolRef
}

// own reports whether a device has the word itself, not only a tool of it.
func (p *postings) own() bool { return len(p.named)+len(p.aside) > 0 }

type toolRef struct {
	list *list
	tool int32
}

// list is a list of tools with the devices that have it.
type list struct {
	tools []Tool
	slots []int32
}

// New returns an empty index.
func New() *Index {
	x := &Index{lists: map[string]*list{}}
	x.clear()
	return x
}

func (x *Index) clear() {
	x.slots, x.dead = nil, 0
	x.byID, x.names, x.words = map[string]int32{}, map[string][]int32{}, map[string]*postings{}
}

// Len returns the number of devices.
func (x *Index) Len() int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return len(x.byID)
}

// HasList reports whether the tools of a list are known.
func (x *Index) HasList(name string) bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	l := x.lists[name]
	return l != nil && l.tools != nil
}

// SetList adds the tools of a list.
func (x *Index) SetList(name string, tools []Tool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	l := x.listLocked(name)
	if l.tools != nil {
		return
	}
	l.tools = append([]Tool{}, tools...)
	x.addListLocked(l)
}

func (x *Index) listLocked(name string) *list {
	l := x.lists[name]
	if l == nil {
		l = &list{}
		x.lists[name] = l
	}
	return l
}

func (x *Index) addListLocked(l *list) {
	for i := range l.tools {
		for word := range toolWords(&l.tools[i]) {
			p := x.wordLocked(word)
			p.tools = append(p.tools, toolRef{l, int32(i)})
		}
	}
}

// toolWords are the words of a tool. The common beginning of all names is none.
func toolWords(t *Tool) map[string]bool {
	set := map[string]bool{}
	addWords(set, strings.TrimPrefix(t.Name, "self."), 2, 2)
	addWords(set, t.Description, 2, 2)
	return set
}

// addWords adds the words of a text, and the parts of its runs of Chinese.
func addWords(set map[string]bool, text string, least, most int) {
	list, joined := tokens(text)
	for _, t := range list {
		if !t.han {
			set[t.text] = true
			continue
		}
		for _, gram := range grams(t.text, least, most) {
			set[gram] = true
		}
	}
	for _, word := range joined {
		set[word] = true
	}
}

func (x *Index) wordLocked(word string) *postings {
	p := x.words[word]
	if p == nil {
		p = &postings{}
		x.words[word] = p
	}
	return p
}

// Put adds or replaces a device.
func (x *Index) Put(d Doc) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if at, known := x.byID[d.ID]; known {
		if x.slots[at].doc.equal(&d) {
			return
		}
		x.removeLocked(d.ID)
	}
	x.putLocked(&d)
}

// Remove removes a device.
func (x *Index) Remove(id string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.removeLocked(id)
}

func (x *Index) removeLocked(id string) {
	at, known := x.byID[id]
	if !known {
		return
	}
	x.slots[at].gone = true
	delete(x.byID, id)
	const most = 1000 // that are not worth a pass over all
	if x.dead++; x.dead > most && x.dead > len(x.slots)/4 {
		x.compactLocked()
	}
}

// compactLocked rebuilds the index without removed devices and unused lists.
func (x *Index) compactLocked() {
	slots := x.slots
	x.clear()
	for _, l := range x.lists {
		l.slots = nil
	}
	for _, s := range slots {
		if !s.gone {
			x.putLocked(s.doc)
		}
	}
	for name, l := range x.lists {
		if l.slots == nil {
			delete(x.lists, name)
			continue
		}
		x.addListLocked(l)
	}
}

func (x *Index) putLocked(d *Doc) {
	at := int32(len(x.slots))
	x.slots = append(x.slots, slot{doc: d})
	x.byID[d.ID] = at
	if name := foldName(d.Name); name != "" {
		x.names[name] = append(x.names[name], at)
	}
	named, aside := ownWords(d)
	for word := range named {
		p := x.wordLocked(word)
		p.named = append(p.named, at)
	}
	for word := range aside {
		if !named[word] {
			p := x.wordLocked(word)
			p.aside = append(p.aside, at)
		}
	}
	if d.List != "" {
		l := x.listLocked(d.List)
		l.slots = append(l.slots, at)
	}
}

// ownWords are the words of a device: those that name it, and those beside.
func ownWords(d *Doc) (named, aside map[string]bool) {
	named, aside = map[string]bool{}, map[string]bool{}
	addWords(named, d.Name, 1, maxGram)
	if !macAddress.MatchString(d.ID) {
		addWords(named, d.ID, 1, maxGram)
	}
	for key, value := range d.Labels {
		addWords(named, value, 1, maxGram)
		addWords(named, key, 1, maxGram)
		named[pairOf(foldName(key), foldName(value))] = true
	}
	addWords(aside, d.Board, 1, maxGram)
	return named, aside
}

// pairOf is the word for a label with its value: `floor 2` is not a floor of any
// device that has a 2 somewhere.
func pairOf(key, value string) string { return key + "=" + value }

// foldName is a name as it is compared: its words, with a space between.
func foldName(name string) string {
	list, _ := tokens(name)
	var b strings.Builder
	for i, t := range list {
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(t.text)
	}
	return b.String()
}

var (
	macAddress = regexp.MustCompile(`^[0-9a-f]{2}(:[0-9a-f]{2}){5}$`)
	macPart    = regexp.MustCompile(`(?i)\b[0-9a-f]{2}([:-][0-9a-f]{2}){1,5}\b|\b[0-9a-f]{6,12}\b`)
)

// Named returns the devices that have this name, whatever its case,
// accents and punctuation, among those that see accepts.
func (x *Index) Named(name string, see func(*Doc) bool) (named []Match) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	for _, at := range x.names[foldName(name)] {
		if s := &x.slots[at]; !s.gone && see(s.doc) {
			named = append(named, Match{Doc: s.doc, Exact: true})
		}
	}
	slices.SortFunc(named, func(a, b Match) int { return strings.Compare(a.ID, b.ID) })
	return named
}

// Labels are the keys of the devices' labels with their values, the most frequent
// first, among the devices that see accepts, whose number is total.
func (x *Index) Labels(see func(*Doc) bool, keys, values int) (labels []Label, total int) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	counts := map[string]map[string]int{}
	for _, s := range x.slots {
		if s.gone || !see(s.doc) {
			continue
		}
		total++
		for k, v := range s.doc.Labels {
			if counts[k] == nil {
				counts[k] = map[string]int{}
			}
			counts[k][v]++
		}
	}
	for key, of := range counts {
		l := Label{Key: key}
		for value, n := range of {
			l.Values, l.n = append(l.Values, value), l.n+n
		}
		slices.SortFunc(l.Values, func(a, b string) int { return cmp.Or(cmp.Compare(of[b], of[a]), strings.Compare(a, b)) })
		if l.More = len(l.Values) > values; l.More {
			l.Values = l.Values[:values]
		}
		labels = append(labels, l)
	}
	slices.SortFunc(labels, func(a, b Label) int { return cmp.Or(cmp.Compare(b.n, a.n), strings.Compare(a.Key, b.Key)) })
	return labels[:min(len(labels), keys)], total
}

// Label is a key with some of its values.
type Label struct {
	Key    string
	Values []string
	More   bool // there are other values
	n      int  // devices
}
