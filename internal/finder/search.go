package finder

import (
	"cmp"
	"context"
	"slices"
	"strings"
)

// Search is a search request.
type Search struct {
	Text string
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
	// names; those that are named exactly like that come first. Weaker is how many others have all words, too, but only in their tools, board or
	// names of labels where these have them in their name or the value of a label.
	Found  []*Doc
	Weaker int
	// Unknown are words that no device has. ReadAs are slips with what they were taken
	// for. If nothing is found although there is no unknown word, Counts has the number
	// of devices for each word.
	Unknown []string
	ReadAs  map[string]string
	Counts  map[string]int
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
}

// search is a search in progress.
type search struct {
	*Index
	Search
	ctx    context.Context
	result Result
	terms  []term
	seen   []bool   // by slot: whether the caller may see the device
	stamp  []uint32 // the term that was counted last
	have   []uint16 // required terms that the device has
	cost   []uint16 // how far off it has them
	extra  []uint16 // soft terms that it has
}

// Find returns the devices that have all words of a search. It fails with the error of the context when that ends.
func (x *Index) Find(ctx context.Context, q Search) (Result, error) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	s := &search{Index: x, Search: q, ctx: ctx, result: Result{ReadAs: map[string]string{}, Counts: map[string]int{}}}
	s.seen = make([]bool, len(x.slots))
	for i := range x.slots {
		s.seen[i] = !x.slots[i].gone && q.See(x.slots[i].doc)
	}
	s.read()
	if len(s.result.Unknown) == 0 {
		s.match()
		s.collect()
	}
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
	// Where no word names a device, those that its tools have must do.
	if !slices.ContainsFunc(s.terms, func(t term) bool { return !t.soft }) {
		for i := range s.terms {
			s.terms[i].soft = false
		}
	}
}

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
			s.add(t.raw, true, t.text)
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

// split takes a word as two that are written together.
func (s *search) split(word string) (a, b string, ok bool) {
	const least = 3
	for i := least; i+least <= len(word); i++ {
		if a, b = word[:i], word[i:]; s.lives(a) && s.lives(b) {
			return a, b, true
		}
	}
	return "", "", false
}

// like are the words nearest to one that nobody has: those that begin with it, else
// those that it is a slip of, else those that it is a part of. own reports whether
// devices have them, and not only tools.
func (s *search) like(word string) (words []string, own bool) {
	const short = 3
	if len(word) < short {
		return nil, false
	}
	slips := 1
	if len(word) >= 8 {
		slips = 2
	}
	matches := []func(string) bool{
		func(w string) bool { return strings.HasPrefix(w, word) },
		func(w string) bool { return len(word) > short && near(w, word, 1) },
		func(w string) bool { return slips > 1 && near(w, word, slips) },
		func(w string) bool { return strings.Contains(w, word) },
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
	s.stamp, s.have, s.cost, s.extra = make([]uint32, n), make([]uint16, n), make([]uint16, n), make([]uint16, n)
	for i := range s.terms {
		if s.ctx.Err() != nil {
			return
		}
		t := &s.terms[i]
		count := 0
		take := func(at int32, fit int) {
			if !s.seen[at] || s.stamp[at] == uint32(i)+1 {
				return
			}
			s.stamp[at] = uint32(i) + 1
			count++
			if t.soft {
				s.extra[at]++
				return
			}
			s.have[at]++
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
			for _, word := range t.words {
				s.each(word, fit, take)
			}
		}
		s.result.Counts[t.raw] = count
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

// collect keeps those that fit best.
func (s *search) collect() {
	required := uint16(0)
	for _, t := range s.terms {
		if !t.soft {
			required++
		}
	}
	var best [2]int
	better := func(a, b [2]int) bool { return a[0] < b[0] || a[0] == b[0] && a[1] < b[1] }
	all := 0
	for at := range s.slots {
		doc := s.slots[at].doc
		if s.have[at] != required || !s.seen[at] || s.Keep != nil && !s.Keep(doc) {
			continue
		}
		all++
		fit := [2]int{int(s.cost[at]), -int(s.extra[at])}
		if len(s.result.Found) == 0 || better(fit, best) {
			best, s.result.Found = fit, s.result.Found[:0]
		}
		if fit == best {
			s.result.Found = append(s.result.Found, doc)
		}
	}
	if all > 0 {
		s.result.Counts = nil
	}
	s.result.Weaker = all - len(s.result.Found)
	var named []string
	for _, t := range s.terms {
		named = append(named, foldName(t.raw))
	}
	name := strings.Join(named, " ")
	first := map[*Doc]int{}
	for _, d := range s.result.Found {
		if len(d.Name) <= len(s.Text) && foldName(d.Name) == name {
			first[d] = -1
		}
	}
	slices.SortFunc(s.result.Found, func(a, b *Doc) int {
		return cmp.Or(first[a]-first[b], strings.Compare(a.Name, b.Name), strings.Compare(a.ID, b.ID))
	})
}

// Rank returns how well a text with a name fits the words of a query; 0: not at all.
// A word in the name counts most.
func Rank(query string) func(name, text string) int {
	const inName, nearName, inText = 4, 3, 1
	asked := map[string]bool{}
	addWords(asked, query, 2, 2)
	list, _ := tokens(query)
	named := map[string]bool{}
	for _, t := range list {
		if other := opposites[t.text]; named[other] { // off the lamp on the second floor
			delete(asked, t.text)
		} else {
			named[t.text] = true
		}
		if functionWords[t.text] && opposites[t.text] == "" && t.text != "get" && t.text != "set" {
			delete(asked, t.text)
		}
	}
	return func(name, text string) (fit int) {
		ofName, ofText := map[string]bool{}, map[string]bool{}
		addWords(ofName, strings.TrimPrefix(name, "self."), 2, 2)
		addWords(ofText, text, 2, 2)
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
