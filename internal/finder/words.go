package finder

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// Bounds of texts.
const (
	maxText = 1024 // bytes of one text that is indexed or searched for
	maxGram = 4    // characters of Chinese that are indexed together
)

// token is a word as it is compared: folded, in the singular.
type token struct {
	text   string
	raw    string // as it was written, accents included
	han    bool   // a run of a script that does not separate words
	number bool
}

// class of a character in a word.
type class uint8

const (
	separator class = iota
	lower
	upper
	digit
	han
)

func classOf(r rune) class {
	switch {
	case unicode.In(r, unicode.Han, unicode.Hiragana, unicode.Katakana):
		return han
	case unicode.IsDigit(r):
		return digit
	case unicode.IsUpper(r):
		return upper
	case unicode.IsLetter(r):
		return lower
	}
	return separator
}

// tokens splits a text into words: at anything that is not a letter or digit, between
// letters and digits, and where a small letter is followed by a capital one.
// joined also has those words whole that the last rule splits.
func tokens(text string) (list []token, joined []string) {
	if len(text) > maxText {
		text = text[:maxText]
	}
	var runes []rune
	var from, to []int // the bytes of text that a rune comes from, accents included
	for at, written := range text {
		size := utf8.RuneLen(written)
		if size < 0 || written == utf8.RuneError {
			continue // it may be one byte that is no character
		}
		for _, r := range norm.NFKD.String(text[at : at+size]) {
			if !unicode.Is(unicode.Mn, r) {
				runes, from, to = append(runes, r), append(from, at), append(to, at)
			}
		}
		if len(to) > 0 {
			to[len(to)-1] = at + size
		}
	}
	camel := -1 // where a word begins that is split at a capital letter
	for i := 0; i < len(runes); {
		c := classOf(runes[i])
		if c == separator {
			i++
			continue
		}
		begin := i
		for i++; i < len(runes); i++ {
			now, before := classOf(runes[i]), classOf(runes[i-1])
			if now != before && !(before == upper && now == lower) {
				break
			}
		}
		t := token{text: strings.ToLower(string(runes[begin:i])), raw: text[from[begin]:max(from[begin], to[i-1])], han: c == han, number: c == digit}
		switch {
		case t.number:
			if t.text = strings.TrimLeft(t.text, "0"); t.text == "" {
				t.text = "0"
			}
		case t.text == "s" && begin > 1 && (runes[begin-1] == '\'' || runes[begin-1] == '’'): // the study's lamp
			continue
		case isOrdinalEnd(t.text) && len(list) > 0 && begin > 0 && classOf(runes[begin-1]) == digit: // 2nd
			continue
		case !t.han:
			t.text = singular(t.text)
		}
		list = append(list, t)
		splits := i < len(runes) && c != digit && c != han && classOf(runes[i]) == upper
		switch {
		case splits && camel < 0:
			camel = begin
		case !splits && camel >= 0:
			joined = append(joined, singular(strings.ToLower(string(runes[camel:i]))))
			camel = -1
		}
	}
	return list, joined
}

func isOrdinalEnd(text string) bool {
	return text == "st" || text == "nd" || text == "rd" || text == "th"
}

// singular cuts the endings of English plurals. It need not be right, only the same
// for what is indexed and what is searched for.
func singular(word string) string {
	switch n := len(word); {
	case n > 4 && strings.HasSuffix(word, "ies"):
		return word[:n-3] + "y"
	case n > 4 && (strings.HasSuffix(word, "ches") || strings.HasSuffix(word, "shes") || strings.HasSuffix(word, "xes") || strings.HasSuffix(word, "sses")):
		return word[:n-2]
	case n > 3 && word[n-1] == 's' && word[n-2] != 's' && word[n-2] != 'u' && word[n-2] != 'i':
		return word[:n-1]
	}
	return word
}

// grams are the parts of a run of Chinese that are indexed as words.
func grams(run string, least, most int) (list []string) {
	runes := []rune(run)
	for n := least; n <= most; n++ {
		for i := 0; i+n <= len(runes); i++ {
			list = append(list, string(runes[i:i+n]))
		}
	}
	return list
}

// ordinals are the numbers that people write out.
var ordinals = map[string]string{"first": "1", "second": "2", "third": "3", "fourth": "4", "fifth": "5", "sixth": "6", "seventh": "7", "eighth": "8",
	"ninth": "9", "tenth": "10", "ground": "0"}

// cardinals are the others, which may also be a number of devices.
var cardinals = map[string]string{"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9", "ten": "10"}

// functionWords do not identify a device. A device whose name contains one ranks
// above a device whose name does not.
var functionWords = wordSet(`a an the in on at of to for from by with near and or is are be was it its my our your their me i you we they this that these those there here
 please turn switch set make put get give show tell let start stop do does did can could would will have has
 what which who whose where when how much many any some all every each both off up down now
 device devices one ones online offline named called
 der die das den dem des ein eine einen einem einer und im am ans ins zum zur vom von bei mit auf aus fur unter uber alle bitte
 le la les l un une du de d et au aux dans sur sous chez avec pour par tous toutes tout
 el los las al del y en con por para sobre unos unas todas todos
 il lo gli i uno una e dello della dei degli delle nel nello nella nei nelle sul sulla sui sulle dal dalla dall dell nell sull all alla ai alle con tutti tutte
 o os os as ao aos no na nos nas pelo pela num numa com todos todas
 het een op aan naar van met voor bij uit onder boven en alle`)

// functionChars are those of Chinese.
var functionChars = wordSet("的 把 请 让 在 是 吗 呢 吧 了 里 和 给 我 你 个 开 关 打 调 到 有 哪 些 所 都 全 部 那 这 台 们")

func wordSet(text string) map[string]bool {
	set := map[string]bool{}
	for _, word := range strings.Fields(text) {
		set[singular(word)] = true
	}
	return set
}

// near reports whether two words differ by at most so many letters that are missing,
// added, replaced or swapped with the next.
func near(a, b string, most int) bool {
	x, y := []rune(a), []rune(b)
	if len(x)-len(y) > most || len(y)-len(x) > most {
		return false
	}
	var rows [3][maxNear + 1]int
	if len(x) > maxNear || len(y) > maxNear {
		return false
	}
	before, last, row := &rows[0], &rows[1], &rows[2]
	for j := range len(y) + 1 {
		last[j] = j
	}
	for i := 1; i <= len(x); i++ {
		row[0] = i
		least := i
		for j := 1; j <= len(y); j++ {
			cost := 1
			if x[i-1] == y[j-1] {
				cost = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+cost)
			if i > 1 && j > 1 && x[i-1] == y[j-2] && x[i-2] == y[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
			least = min(least, row[j])
		}
		if least > most {
			return false
		}
		before, last, row = last, row, before
	}
	return last[len(y)] <= most
}

// maxNear is the longest word in which slips are looked for.
const maxNear = 32
