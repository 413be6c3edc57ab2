package finder

import (
	"cmp"
	"context"
	"math/bits"
	"slices"
	"strings"
)

// Search is a search request.
type Search struct {
	Text string
	// Do says what the devices are to do: those with a tool for it are preferred.
	Do string
	// See reports whether the caller may see a device: words of others do not exist for
	// it. May reports whether it may ever call a tool.
	See func(*Doc) bool
	May func(*Tool) bool
	// Keep leaves devices out that are not searched.
	Keep func(*Doc) bool
}

// Result is the result of a search.
type Result struct {
	// Found are the devices that fit best, all of them equally well, in order of their
	// names; those that are named exactly like that come first. If no device has all words, they have the most.
	Found []Match
	// Weaker is how many others have all words, too, but only in their tools or board where these have them in their
	// name or labels. Unable is how many fit as well, but have no tool for what is to be done.
	Weaker, Unable int
	// Unknown are words that no device has. ReadAs are slips with what they were taken
	// for. OfTools are words that only tools have: they decide only between devices that fit otherwise.
	Unknown []string
	ReadAs  map[string]string
	OfTools []string
	Blank   bool // the text has no word that says anything
}

// Match is a device that was found.
type Match struct {
	*Doc
	Exact   bool     // it has exactly that name
	Missing []string // words that it does not have, as they were written
}

// How well a device fits a word.
const (
	fitNamed = iota
	fitAside
	fitTool
	fits
)

// term is a word of the question.
type term struct {
	raw   string
	words []string // any of them
	part  string   // of an id; in place of words
	soft  bool     // devices that have it are better, others are found as well
	own   bool     // tools that have it do not count
}

// search is a search in progress.
type search struct {
	*Index
	Search
	ctx    context.Context
	result Result
	terms  []term
	seen   []bool         // by slot: whether the caller may see the device
	stamp  []uint32       // the term that was counted last
	have   []uint64       // required terms that the device has, by their bits
	cost   []uint16       // how far off it has them
	extra  []uint16       // soft terms that it has
	exact  map[int32]bool // devices that are named exactly like that
}

// Find returns the devices that have all words of a search, or else the most of them. It fails with the error of the
// context when that ends.
func (x *Index) Find(ctx context.Context, q Search) (Result, error) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	s := &search{Index: x, Search: q, ctx: ctx, result: Result{ReadAs: map[string]string{}}}
	s.seen = make([]bool, len(x.slots))
	for i := range x.slots {
		s.seen[i] = !x.slots[i].gone && q.See(x.slots[i].doc)
	}
	s.read()
	s.result.Blank = len(s.terms)+len(s.result.Unknown) == 0
	s.match()
	s.collect()
	return s.result, ctx.Err()
}

// read splits the search text into terms. A word may be compared with all words of the fleet, so that the context is
// looked at before each.
func (s *search) read() {
	text := s.Text
	for _, written := range macPart.FindAllString(text, -1) {
		part := strings.ToLower(bareID.Replace(written))
		if s.partOfID(part) {
			text = strings.Replace(text, written, " ", 1)
			s.terms = append(s.terms, term{raw: written, part: part})
		}
	}
	list, _ := tokens(text)
	for i := 0; i < len(list) && s.ctx.Err() == nil; {
		if n := s.pair(list[i:]); n > 0 {
			i += n
			continue
		}
		// `bot three` names one, `three bots` counts.
		if n := cardinals[list[i].text]; n != "" && !s.lives(list[i].text) {
			if i+1 < len(list) && !functionWords[list[i+1].text] {
				i++
				continue
			}
			list[i].text, list[i].number = n, true
		}
		s.word(list[i])
		i++
	}
	s.terms = s.terms[:min(len(s.terms), maxTerms)]
	// Where no word names a device, those that its tools have must do.
	if len(s.result.Unknown) == 0 && !slices.ContainsFunc(s.terms, func(t term) bool { return !t.soft }) {
		for i := range s.terms {
			s.terms[i].soft = false
		}
	}
}

// maxTerms is how many words of a search count; what follows them is left out.
const maxTerms = 64

// bareID takes the separators out of an id.
var bareID = strings.NewReplacer(":", "", "-", "")

// partOfID reports whether the id of a device that the caller may see has a part.
func (s *search) partOfID(part string) bool {
	for at := range s.slots {
		if s.seen[at] && strings.Contains(bareID.Replace(s.slots[at].doc.ID), part) {
			return true
		}
	}
	return false
}

func (s *search) add(raw string, soft bool, words ...string) {
	s.terms = append(s.terms, term{raw: raw, words: words, soft: soft})
}

// pair takes a label's key beside its value, in either order, as one term: it
// returns how many words these are.
func (s *search) pair(list []token) int {
	for n := min(3, len(list)); n > 1; n-- {
		var words []string
		for _, t := range list[:n] {
			words = append(words, cmp.Or(ordinals[t.text], cardinals[t.text], t.text))
		}
		first, rest := words[0], strings.Join(words[1:], " ")
		end, front := words[n-1], strings.Join(words[:n-1], " ")
		for _, word := range []string{pairOf(first, rest), pairOf(end, front)} {
			if s.lives(word) {
				s.add(front+" "+end, false, word)
				return n
			}
		}
	}
	return 0
}

// lives reports whether a device that the caller may see has a word itself.
func (s *search) lives(word string) bool {
	p := s.words[word]
	return p != nil && (slices.ContainsFunc(p.named, s.sees) || slices.ContainsFunc(p.aside, s.sees))
}

func (s *search) sees(at int32) bool { return s.seen[at] }

// tooled reports whether a tool has a word that the caller may call and a device has
// that it may see.
func (s *search) tooled(word string) bool {
	p := s.words[word]
	return p != nil && slices.ContainsFunc(p.tools, func(r toolRef) bool {
		return s.May(&r.list.tools[r.tool]) && slices.ContainsFunc(r.list.slots, s.sees)
	})
}

// word takes one word.
func (s *search) word(t token) {
	if t.han {
		s.run(t)
		return
	}
	if functionWords[t.text] {
		if p := s.words[t.text]; p != nil && slices.ContainsFunc(p.named, s.sees) {
			s.terms = append(s.terms, term{raw: t.raw, words: []string{t.text}, soft: true, own: true})
		}
		return
	}
	words := []string{t.text}
	if n := ordinals[t.text]; n != "" {
		words = append(words, n)
	}
	switch {
	case slices.ContainsFunc(words, s.lives):
		s.add(t.raw, false, words...)
		return
	case slices.ContainsFunc(words, s.tooled):
		s.add(t.raw, true, words...)
		s.result.OfTools = append(s.result.OfTools, t.raw)
		return
	}
	if !t.number {
		if a, b, ok := s.split(t.text); ok {
			s.add(t.raw, false, a)
			s.add(t.raw, false, b)
			s.result.ReadAs[t.raw] = a + " " + b
			return
		}
		if like, own := s.like(t.text); len(like) > 0 {
			s.add(t.raw, !own, like...)
			if !own {
				s.result.OfTools = append(s.result.OfTools, t.raw)
			}
			s.result.ReadAs[t.raw] = strings.Join(like[:min(len(like), 3)], ", ")
			return
		}
	}
	s.result.Unknown = append(s.result.Unknown, t.raw)
}

// run takes a run of Chinese apart: the longest parts that devices have are its
// words.
func (s *search) run(t token) {
	runes := []rune(t.text)
	var unknown []rune
	flush := func() {
		if len(unknown) > 0 {
			s.result.Unknown = append(s.result.Unknown, string(unknown))
			unknown = nil
		}
	}
next:
	for i := 0; i < len(runes); {
		for n := min(maxGram, len(runes)-i); n > 0; n-- {
			part := string(runes[i : i+n])
			own := s.lives(part) && !(n == 1 && functionChars[part])
			if own || n == 2 && s.tooled(part) {
				flush()
				s.add(part, !own, part)
				i += n
				continue next
			}
		}
		if functionChars[string(runes[i])] {
			flush()
		} else {
			unknown = append(unknown, runes[i])
		}
		i++
	}
	flush()
}

// split takes a word as two that are written together, in German and Dutch perhaps with letters that join them: Küchenlampe.
func (s *search) split(word string) (a, b string, ok bool) {
	const least = 3
	for i := least; i+least <= len(word); i++ {
		if b = word[i:]; !s.lives(b) {
			continue
		}
		for _, joint := range []string{"", "n", "s", "en", "es", "er"} {
			if a = strings.TrimSuffix(word[:i], joint); len(a) >= least && s.lives(a) {
				return a, b, true
			}
		}
	}
	return "", "", false
}

// like are the words nearest to one that nobody has: those that begin with it, else
// those that it is a slip of, else those that it is a part of. A word under five letters is part of too many. own reports whether
// devices have them, and not only tools.
func (s *search) like(word string) (words []string, own bool) {
	const short, part = 3, 5
	if len(word) <= short {
		return nil, false
	}
	slips := 1
	if len(word) >= 8 {
		slips = 2
	}
	matches := []func(string) bool{
		func(w string) bool { return len(word) >= part && strings.HasPrefix(w, word) },
		func(w string) bool { return near(w, word, 1) },
		func(w string) bool { return slips > 1 && near(w, word, slips) },
		func(w string) bool { return len(word) >= part && strings.Contains(w, word) },
	}
	var named, tools [4][]string
	for w, p := range s.words {
		if len(w) < short || strings.ContainsRune(w, '=') {
			continue
		}
		for i, matches := range matches {
			if !matches(w) {
				continue
			}
			if p.own() && s.lives(w) {
				named[i] = append(named[i], w)
			} else if len(w) > 5 && i < 3 && s.tooled(w) {
				tools[i] = append(tools[i], w)
			}
			break
		}
	}
	for i := range matches {
		slices.Sort(named[i])
		slices.Sort(tools[i])
		if len(named[i]) > 0 {
			return named[i], true
		}
		if len(tools[i]) > 0 {
			return tools[i], false
		}
	}
	return nil, false
}

// match finds out which terms each device has, and how well.
func (s *search) match() {
	n := len(s.slots)
	s.stamp, s.have, s.cost, s.extra = make([]uint32, n), make([]uint64, n), make([]uint16, n), make([]uint16, n)
	for i := range s.terms {
		if s.ctx.Err() != nil {
			return
		}
		t := &s.terms[i]
		take := func(at int32, fit int) {
			if !s.seen[at] || s.stamp[at] == uint32(i)+1 {
				return
			}
			s.stamp[at] = uint32(i) + 1
			if t.soft {
				s.extra[at]++
				return
			}
			s.have[at] |= 1 << i
			s.cost[at] += uint16(fit)
		}
		if t.part != "" {
			for at := range s.slots {
				if strings.Contains(bareID.Replace(s.slots[at].doc.ID), t.part) {
					take(int32(at), fitNamed)
				}
			}
		}
		for fit := range fits {
			if t.own && fit == fitTool {
				break
			}
			for _, word := range t.words {
				s.each(word, fit, take)
			}
		}
	}
}

// each calls take for the devices that have a word in one way.
func (s *search) each(word string, fit int, take func(at int32, fit int)) {
	p := s.words[word]
	if p == nil {
		return
	}
	switch fit {
	case fitNamed:
		for _, at := range p.named {
			take(at, fit)
		}
	case fitAside:
		for _, at := range p.aside {
			take(at, fit)
		}
	case fitTool:
		for _, r := range p.tools {
			if s.May(&r.list.tools[r.tool]) {
				for _, at := range r.list.slots {
					take(at, fit)
				}
			}
		}
	}
}

// fit is how well a device fits: the fewer of each, the better, the first ones first.
type fit struct{ missing, unable, cost, soft int }

func (f fit) compare(o fit) int {
	return cmp.Or(f.missing-o.missing, f.unable-o.unable, f.cost-o.cost, f.soft-o.soft)
}

// collect keeps those that fit best.
func (s *search) collect() {
	required := 0
	for _, t := range s.terms {
		if !t.soft {
			required++
		}
	}
	var named []string
	for _, t := range s.terms {
		named = append(named, foldName(t.raw))
	}
	s.exact = map[int32]bool{}
	for _, name := range []string{strings.Join(named, " "), foldName(s.Text)} {
		for _, at := range s.names[name] {
			s.exact[at] = true
		}
	}
	var able map[*list]bool
	each := func(f func(at int, fit fit)) {
		for at := range s.slots {
			doc := s.slots[at].doc
			if !s.seen[at] || s.have[at] == 0 && (required > 0 || s.extra[at] == 0) || s.Keep != nil && !s.Keep(doc) {
				continue
			}
			one := fit{missing: required - bits.OnesCount64(s.have[at]), cost: int(s.cost[at]), soft: len(s.terms) - int(s.extra[at])}
			if able != nil && !able[s.lists[doc.List]] {
				one.unable = 1
			}
			f(at, one)
		}
	}
	if s.Do != "" {
		able = s.able(each)
	}
	best := fit{missing: maxTerms + 1}
	each(func(_ int, one fit) {
		if one.compare(best) < 0 {
			best = one
		}
	})
	each(func(at int, one fit) {
		switch {
		case one == best:
			s.found(at)
		case one.missing == best.missing && one.unable > best.unable:
			s.result.Unable++
		case one.missing == 0 && one.cost > best.cost && one.soft <= best.soft && len(s.result.Unknown) == 0:
			s.result.Weaker++
		}
	})
	slices.SortFunc(s.result.Found, func(a, b Match) int {
		switch {
		case a.Exact && !b.Exact:
			return -1
		case b.Exact && !a.Exact:
			return 1
		}
		return cmp.Or(compareNames(a.Name, b.Name), strings.Compare(a.ID, b.ID))
	})
}

// compareNames compares names as people order them: dock 2 comes before dock 10.
func compareNames(a, b string) int {
	for a != "" && b != "" {
		x, y := digits(a), digits(b)
		if len(x) == 0 || len(y) == 0 {
			if a[0] != b[0] {
				break
			}
			a, b = a[1:], b[1:]
			continue
		}
		m, n := strings.TrimLeft(x, "0"), strings.TrimLeft(y, "0")
		if c := cmp.Or(len(m)-len(n), strings.Compare(m, n)); c != 0 {
			return c
		}
		a, b = a[len(x):], b[len(y):]
	}
	return strings.Compare(a, b)
}

// digits returns the digits with which a text begins.
func digits(text string) string {
	return text[:len(text)-len(strings.TrimLeft(text, "0123456789"))]
}

// found adds the device in a slot to the result.
func (s *search) found(at int) {
	m := Match{Doc: s.slots[at].doc}
	for i, t := range s.terms {
		if !t.soft && s.have[at]&(1<<i) == 0 {
			m.Missing = append(m.Missing, t.raw)
		}
	}
	m.Missing = append(m.Missing, s.result.Unknown...)
	m.Exact = len(m.Missing) == 0 && s.exact[int32(at)]
	s.result.Found = append(s.result.Found, m)
}

// maxAble is how many tools are ranked for one search; where the devices that fit have more, none is preferred.
const maxAble = 2000

// able returns the lists with a tool for what is to be done: half as good as the best one that devices have which lack the fewest words,
// or better. It is nil if there is none.
func (s *search) able(each func(func(at int, fit fit))) map[*list]bool {
	least, n := maxTerms+1, 0
	lists := map[*list]bool{}
	each(func(at int, one fit) {
		if one.missing < least {
			least, n = one.missing, 0
			clear(lists)
		}
		if l := s.lists[s.slots[at].doc.List]; one.missing == least && l != nil && !lists[l] {
			lists[l], n = true, n+len(l.tools)
		}
	})
	if n > maxAble {
		return nil
	}
	rank, best := Rank(s.Do), 0
	fits := map[*list]int{}
	for l := range lists {
		for i := range l.tools {
			if t := &l.tools[i]; s.May(t) {
				fits[l] = max(fits[l], rank(t.Name, t.Description))
			}
		}
		best = max(best, fits[l])
	}
	if best == 0 {
		return nil
	}
	for l := range lists {
		lists[l] = 2*fits[l] >= best
	}
	return lists
}

// Rank returns how well a text with a name fits the words of a query; 0: not at all.
// A word in the name counts most; verbs such as turn, stop and show decide between tools that fit alike.
func Rank(query string) func(name, text string) int {
	const inName, nearName, inText = 4, 3, 1
	asked := map[string]bool{}
	addWords(asked, query, 1, 2)
	for char := range functionChars {
		delete(asked, char)
	}
	list, _ := tokens(query)
	named := map[string]bool{}
	verbs := map[string]bool{}
	for _, t := range list {
		if other := opposites[t.text]; named[other] { // off the lamp on the second floor
			delete(asked, t.text)
		} else {
			named[t.text] = true
		}
		if functionWords[t.text] && opposites[t.text] == "" {
			delete(asked, t.text)
			verbs[t.text] = true
		}
	}
	return func(name, text string) (fit int) {
		ofName, ofText := map[string]bool{}, map[string]bool{}
		addWords(ofName, strings.TrimPrefix(name, "self."), 1, 2)
		addWords(ofText, text, 1, 2)
		for word := range asked {
			switch {
			case ofName[word]:
				fit += inName
			case len(word) > 3 && nearAny(ofName, word):
				fit += nearName
			case ofText[word]:
				fit += inText
			}
		}
		for word := range verbs {
			if ofName[word] {
				fit++
			}
		}
		return fit
	}
}

// opposites are pairs of words of which only the first one in a query counts.
var opposites = map[string]string{"on": "off", "off": "on", "up": "down", "down": "up"}

func nearAny(words map[string]bool, word string) bool {
	for w := range words {
		if len(w) > 3 && (strings.HasPrefix(w, word) || near(w, word, 1)) {
			return true
		}
	}
	return false
}

// Nearest returns at most so many of the names that are most like one, the best
// first.
func Nearest(name string, names []string, most int) (like []string) {
	rank, folded := Rank(name), strings.ToLower(name)
	fit := map[string]int{}
	for _, n := range names {
		fit[n] = rank(n, "")
		if near(strings.ToLower(n), folded, 2) {
			fit[n] += 100 // a slip
		}
		if fit[n] > 0 {
			like = append(like, n)
		}
	}
	slices.SortStableFunc(like, func(a, b string) int { return fit[b] - fit[a] })
	return like[:min(len(like), most)]
}
