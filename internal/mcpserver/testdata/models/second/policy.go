package models

import (
	"encoding/json"
	"fmt"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// lexicon is what a model knows of the languages: per line a concept (in English) and its common words. "!" marks kinds of devices.
// (two concepts a line)
const lexicon = `!lamp|en lamp lamps light lights bulb|de lampe lampen licht lichter leuchte|fr lampe lampes lumière lumières|es lámpara lámparas luz luces|it lampada luce|zh 灯 电灯 台灯 灯光;!speaker|en speaker speakers loudspeaker sound|de lautsprecher lautsprechern box boxen|fr enceinte enceintes haut-parleur haut-parleurs|es altavoz altavoces|it altoparlante|zh 音箱 音响 喇叭 扬声器
!display|en display displays screen screens monitor|de anzeige anzeigen bildschirm bildschirme display displays|fr écran écrans|es pantalla pantallas|it schermo|zh 显示屏 显示器 屏幕;!camera|en camera cameras cam cams|de kamera kameras|fr caméra caméras|es cámara cámaras|it videocamera|zh 摄像头 相机
!panel|en panel panels|de tafel tafeln|fr panneau panneaux|es panel paneles|zh 面板;!toy|en toy toys|de spielzeug|fr jouet jouets|es juguete juguetes|zh 玩具
!robot|en robot robots|de roboter|fr robot robots|es robot robots|zh 机器人;!cart|en cart carts trolley|de wagen|fr chariot chariots|es carro carros carrito|zh 推车 小车
room|en room rooms|de zimmer zimmern|fr chambre chambres|es habitación habitaciones cuarto|zh 房间 房;kitchen|en kitchen|de küche|fr cuisine|es cocina|it cucina|zh 厨房
living room|en living_room lounge|de wohnzimmer|fr salon|es salón sala_de_estar|zh 客厅;bedroom|en bedroom|de schlafzimmer|fr chambre_à_coucher|es dormitorio|zh 卧室
bathroom|en bathroom|de bad badezimmer|fr salle_de_bain salle_de_bains|es baño|zh 浴室 卫生间;nursery|en nursery|de kinderzimmer|fr chambre_de_bébé chambre_d'enfant|es cuarto_del_bebé|zh 婴儿房 儿童房
study|en study|de arbeitszimmer|fr bureau|es estudio despacho|zh 书房;hallway|en hallway hall corridor|de flur diele|fr couloir|es pasillo|zh 走廊 过道
entrance|en entrance|de eingang|fr entrée|es entrada|zh 门口 入口;reception|en reception|de rezeption empfang|fr réception|es recepción|it reception|zh 前台
garage|en garage|de garage|fr garage|es garaje|zh 车库;garden|en garden|de garten|fr jardin|es jardín|zh 花园
balcony|en balcony|de balkon|fr balcon|es balcón|zh 阳台;courtyard|en courtyard yard patio|de hof innenhof|fr cour|es patio|it cortile|zh 院子
warehouse|en warehouse storeroom|de lager|fr entrepôt|es almacén|zh 仓库;dock|en dock docks|de rampe|fr quai quais|es muelle muelles|zh 码头
loading bay|en loading_bay|de laderampe|fr quai_de_chargement|es muelle_de_carga|zh 装货区;forklift|en forklift|de gabelstapler stapler|fr chariot_élévateur|es carretilla_elevadora|zh 叉车
shelf|en shelf shelves|de regal regale|fr étagère étagères rayon|es estante estantes estantería|zh 货架;office|en office|de büro|fr bureau|es oficina|zh 办公室
meeting room|en meeting_room|de besprechungsraum|fr salle_de_réunion|es sala_de_reuniones|zh 会议室;dining room|en dining_room|de speisesaal|fr salle_à_manger|es comedor|zh 餐厅
canteen|en canteen cafeteria|de kantine mensa|fr cantine|es cantina|zh 食堂;breakfast room|en breakfast_room|de frühstücksraum|fr salle_du_petit_déjeuner|es sala_de_desayunos|it sala_colazione
pool|en pool|de schwimmbad|fr piscine|es piscina|zh 泳池 游泳池;gym|en gym|de turnhalle|fr gymnase|es gimnasio|zh 体育馆
library|en library|de bibliothek bücherei|fr bibliothèque|es biblioteca|zh 图书馆;classroom|en classroom|de klassenzimmer|fr salle_de_classe|es aula|zh 教室
staff room|en staff_room|de lehrerzimmer|fr salle_des_profs|es sala_de_profesores|zh 教师办公室;music room|en music_room|de musikraum|fr salle_de_musique|es sala_de_música|zh 音乐教室
laboratory|en lab laboratory|de labor|fr labo laboratoire|es laboratorio|zh 实验室;chemistry|en chemistry|de chemie|fr chimie|es química|zh 化学
physics|en physics|de physik|fr physique|es física|zh 物理`

const stopWords = ` the a an all them every each of in on at by with for my our that this those these please number no nr offline and to
 der die das den dem des ein eine einen im am an in auf von vom zum zur beim bei alle allen aller bitte nummer und mit
 le la les l d un une de du des à a au aux dans sur toutes tous tout et numéro chez s el los las lo en al del y todas todos todo número por con una
 的 和 里 上 那个 这个 那 这 所有 都 在 各 号 与 跟 把 那些 这些 全部 离线 不在线 `
type word struct {
	concept string; langs   map[string]bool; kind    bool
}
type token struct{ surface, folded, concept string }
var words, english, phrases, folder = map[string]*word{}, map[string]string{}, []string{}, strings.NewReplacer("á", "a", "à", "a", "â", "a", "ä", "a", "é", "e", "è", "e", "ê", "e",
	"ë", "e", "í", "i", "ì", "i", "î", "i", "ï", "i", "ó", "o", "ò", "o", "ô", "o", "ö", "o", "ú", "u", "ù", "u", "û", "u", "ü", "u", "ñ", "n", "ç", "c", "ß", "ss", "’", "'")
var sorted []string
var singular, kinds, stops = map[string]string{}, map[string]bool{}, map[string]bool{}
func fold(s string) string { return folder.Replace(strings.ToLower(s)) }
func init() {
	for _, line := range strings.FieldsFunc(lexicon, func(r rune) bool { return r == '\n' || r == ';' }) {
		part := strings.Split(line, "|"); concept := strings.TrimPrefix(part[0], "!"); kinds[concept] = part[0] != concept
		for _, p := range part[1:] {
			f := strings.Fields(p)
			for _, w := range f[1:] {
				k := fold(w); if words[k] == nil { words[k] = &word{concept, map[string]bool{}, kinds[concept]} }; words[k].langs[f[0]] = true
				singular[f[0]+concept] = strings.ReplaceAll(f[1], "_", " "); if strings.Contains(k, "_") || strings.Contains(k, "-") || f[0] == "zh" { phrases = append(phrases, k) }
			}
		}
		english[concept] = concept
	}
	sort.SliceStable(phrases, func(i, j int) bool { return len(phrases[i]) > len(phrases[j]) }); for k := range words { sorted = append(sorted, k) }; sort.Strings(sorted)
	for _, w := range strings.Fields(stopWords) { stops[fold(w)] = true }
}

// tokens splits a text or a name into words and gives each its concept.
func tokens(text string) (out []token) {
	s := fold(text)
	for i, p := range phrases {
		plain := strings.NewReplacer("_", " ").Replace(p)
		if p[0] >= 128 {
			s = strings.ReplaceAll(s, plain, fmt.Sprintf(" \x01%d\x01 ", i))
		} else if t := " " + s + " "; strings.Contains(t, " "+plain+" ") { s = strings.ReplaceAll(t, " "+plain+" ", fmt.Sprintf(" \x01%d\x01 ", i)) }
	}
	for _, w := range []string{"那个", "这个", "那些", "这些", "所有", "全部", "不在线", "离线", "的", "和", "、"} { s = strings.ReplaceAll(s, w, " ") }
	s = regexp.MustCompile(`(\d)([^\d\x01\s])|(\p{Han})(\d)`).ReplaceAllStringFunc(s, func(m string) string {
		r := []rune(m); if unicode.Is(unicode.Han, r[0]) || unicode.Is(unicode.Han, r[1]) { return string(r[0]) + " " + string(r[1]) }; return m
	})
	for _, f := range strings.FieldsFunc(s, func(r rune) bool { return r != 1 && !unicode.IsLetter(r) && !unicode.IsDigit(r) }) {
		if f[0] == 1 {
			n, _ := strconv.Atoi(strings.Trim(f, "\x01")); out = append(out, token{strings.ReplaceAll(phrases[n], "_", " "), phrases[n], words[phrases[n]].concept}); continue
		}
		if stops[f] { continue }; if w := words[f]; w != nil { out = append(out, token{f, f, w.concept}); continue }; t := []token{{f, f, ""}}
		for _, k := range sorted { // a compound that ends with a kind, then a slip of the pen
			w := words[k]
			if head := strings.TrimSuffix(f, k); w.kind && len(k) >= 4 && head != f && len(head) >= 4 {
				t = []token{{head, head, ""}, {k, k, w.concept}}; if h := words[head]; h != nil { t[0].concept = h.concept }
			}
		}
		if len(t) == 1 && len(f) >= 6 { for _, k := range sorted { if near(f, k) { t[0].concept = words[k].concept } } }; out = append(out, t...)
	}
	return out
}

// written gives a folded word as it stands in the text.
func written(text, folded string) string {
	r, low := []rune(strings.ToLower(text)), []rune(fold(text)); at := strings.Index(string(low), folded); if at < 0 || len(r) != len(low) { return folded }
	at = len([]rune(string(low)[:at])); return string(r[at : at+len([]rune(folded))])
}
func isNumber(s string) bool { _, err := strconv.Atoi(s); return err == nil }

// near: one slip of the pen in six letters or more, two in ten.
func near(x, y string) bool {
	a, b := []rune(x), []rune(y); if len(a) < 6 || len(b) < 6 || isNumber(x) { return false }; d := make([][]int, len(a)+1)
	for i := range d {
		d[i] = make([]int, len(b)+1)
		for j := range d[i] {
			if i == 0 || j == 0 { d[i][j] = i + j; continue }; c := 1; if a[i-1] == b[j-1] { c = 0 }; d[i][j] = min(d[i-1][j]+1, d[i][j-1]+1, d[i-1][j-1]+c)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] { d[i][j] = min(d[i][j], d[i-2][j-2]+1) }
		}
	}
	return d[len(a)][len(b)] <= 1 || (d[len(a)][len(b)] == 2 && min(len(a), len(b)) >= 10)
}
func fit(t, n token, lang string) float64 {
	w, v := words[t.folded], words[n.folded]
	switch {
	case t.folded == n.folded || isNumber(t.folded) && isNumber(n.folded) && strings.TrimLeft(t.folded, "0") == strings.TrimLeft(n.folded, "0"):
		return 1
	case v != nil && t.concept == v.concept && (v.langs[lang] || w != nil && anyOf(w.langs, v.langs)):
		return 0.95
	case near(t.folded, n.folded):
		return 0.9
	case t.concept != "" && t.concept == n.concept:
		return 0.8
	case len(n.folded) >= 5 && (strings.HasPrefix(t.folded, n.folded) || strings.HasSuffix(t.folded, n.folded)):
		return 0.7
	}
	return 0
}
func anyOf(a, b map[string]bool) bool {
	for k := range a { if b[k] { return true } }; return false
}

// score says how well a device fits the words, from 0 to 1.05; 0 if a word has no match.
func score(who []token, d map[string]any, lang string) float64 {
	name := tokens(str(d, "name")); labels, _ := json.Marshal(d["labels"]); extra, sum, used := tokens(string(labels)), 0.0, map[int]bool{}
	for _, t := range who {
		best, at := 0.0, -1; for i, n := range name { if f := fit(t, n, lang); f > best { best, at = f, i } }
		for _, n := range extra { if f := fit(t, n, lang) * 0.8; f > best && !isNumber(t.folded) { best, at = f, -1 } }; if best < 0.6 { return 0 }; used[at] = true; sum += best
	}
	delete(used, -1); if len(who) == 0 { return 0 }; s := sum / float64(len(who)); if len(used) == len(name) { s += 0.05 }; return s
}
func str(m map[string]any, keys ...string) string {
	for _, k := range keys { if s, ok := dig(m, k).(string); ok && s != "" { return s } }; return ""
}

// dig finds a member, the outermost first.
func dig(v any, key string) any {
	m, _ := v.(map[string]any); if x, ok := m[key]; ok { return x }; for _, x := range m { if y := dig(x, key); y != nil { return y } }; return nil
}
func list(v any) (out []map[string]any) {
	a, _ := v.([]any); for _, x := range a { if m, ok := x.(map[string]any); ok { out = append(out, m) } }; if a, ok := v.([]map[string]any); ok { return a }; return out
}
type player struct {
	h     Host; r     Request; group bool; seen  map[string]bool; all   []map[string]any
	dead  string // the last error
}
func (p *player) call(tool string, args map[string]any) (map[string]any, bool) {
	a, failed := p.h.Call(tool, args); if failed { p.dead = str(a, "code") + ": " + str(a, "detail") }; return a, failed
}
func (p *player) find(query, do string) {
	args := map[string]any{"query": strings.TrimSpace(query)}; if do != "" { args["do"] = do }; if p.group { args["limit"] = 100 }
	for page := 0; page < 4; page++ {
		a, failed := p.call("find_devices", args); fresh := 0
		for _, d := range list(dig(a, "devices")) { if id := str(d, "id", "name"); !p.seen[id] { p.seen[id] = true; p.all = append(p.all, d); fresh++ } }
		next := str(a, "next_cursor"); if failed || next == "" || !p.group || fresh == 0 { return }; args["cursor"] = next
	}
}

// best gives the devices that fit best, within a margin.
func (p *player) best(who []token, do string, margin float64, keep func(map[string]any) bool) (out []map[string]any) {
	top, able := 0.0, false
	type hit struct {
		d map[string]any; s float64
	}
	var hits []hit
	for _, d := range p.all {
		if s := score(who, d, p.r.Language); s > 0 && (keep == nil || keep(d)) {
			ok := do == "" || suits(toolOf(d, do, p.r.Values), do, p.r.Values); if ok && !able { hits, able = nil, true }; if ok || !able { hits = append(hits, hit{d, s}) }
		}
	}
	for _, x := range hits { top = max(top, x.s) }; for _, x := range hits { if x.s >= top-margin { out = append(out, x.d) } }; return out
}

// one finds the one device that is meant; it asks if several fit.
func (p *player) one(do string) map[string]any {
	_, _, text := numbers(p.r.Who, false); who := tokens(text)
	kind := map[string]string{"photo": "camera", "volume": "speaker", "theme": "display", "lamp": "lamp", "message": "display"}; var found []map[string]any; asked := ""
	for try := 0; try < 3 && len(found) == 0; try++ {
		var q []string
		for _, t := range who {
			if t.concept != "" && try == 1 { q = append(q, english[t.concept]) } else if try < 2 {
				q = append(q, written(p.r.Who, t.surface))
			} else if kinds[t.concept] { q = []string{english[t.concept]} }
		}
		for w, k := range kind { if try == 2 && len(q) == 0 && strings.Contains(p.r.Do, w) { q, p.group = []string{k}, true } }
		if s := strings.Join(q, " "); s != "" && s != asked { p.find(s, do); asked = s; found = p.best(who, do, 0.005, nil) }; p.group = false
	}
	if len(found) < 2 { return append(found, nil)[0] }; var names []string; for _, d := range found { names = append(names, str(d, "name")) }
	chosen := p.h.Ask("Which one do you mean?", names); for _, d := range found { if str(d, "name") == chosen { return d } }; return found[0]
}

// numbers reads ranges, lists and floors, and gives the text without them.
func numbers(text string, several bool) (set map[int]bool, floor int, rest string) {
	s, set := fold(text), map[int]bool{}
	for i, c := range []string{"十", "一", "二", "三", "四", "五", "六", "七", "八", "九"} { s = regexp.MustCompile(c+"(号|楼|层|房)").ReplaceAllString(s, fmt.Sprintf("%d$1", (i+9)%10+1)) }
	for i, o := range []string{"first|erste[nr]?|premier|primera?", "second|zweite[nr]?|deuxieme|segund[ao]", "third|dritte[nr]?|troisieme|tercera?"} {
		s = regexp.MustCompile(`\b(`+o+`)\b`).ReplaceAllString(s, strconv.Itoa(i+1)+".")
	}
	floors := regexp.MustCompile(`(\d+)(\.|st|nd|rd|er|e|eme)?\s*(stock|etage|floor|planta|piso|楼|层)`)
	if m := floors.FindStringSubmatch(s); m != nil { floor, _ = strconv.Atoi(m[1]); s = floors.ReplaceAllString(s, " ") }
	s = strings.ReplaceAll(s, "号", " "); if !several { return set, floor, s }; ranges := regexp.MustCompile(`\b(\d+)\s*(-|–|to|through|bis|a|al|hasta|到|至)\s*(la |el )?(\d+)\b`)
	for _, m := range ranges.FindAllStringSubmatch(s, -1) { a, _ := strconv.Atoi(m[1]); b, _ := strconv.Atoi(m[4]); for ; a <= b && b-a < 1000; a++ { set[a] = true } }
	s = ranges.ReplaceAllString(s, " "); number := regexp.MustCompile(`\b\d+\b`); for _, m := range number.FindAllString(s, -1) { n, _ := strconv.Atoi(m); set[n] = true }
	return set, floor, number.ReplaceAllString(s, " ")
}

// many finds the devices of a group.
func (p *player) many(do string) (out []map[string]any) {
	p.group = true; set, floor, text := numbers(p.r.Who, true); var parts [][]token; var kind []token
	for _, part := range regexp.MustCompile(`,|、|和|&| and | und | et | y `).Split(text, -1) {
		if t := tokens(part); len(t) > 0 { parts = append(parts, t); for _, x := range t { if kinds[x.concept] { kind = []token{x} } } }
	}
	keep := func(d map[string]any) bool {
		var n []int; for _, t := range tokens(str(d, "name")) { if i, err := strconv.Atoi(t.folded); err == nil { n = append(n, i) } }
		if floor > 0 { if f := dig(d["labels"], "floor"); f != nil { return fmt.Sprint(f) == strconv.Itoa(floor) }; return len(n) > 0 && n[0]/100 == floor }
		return len(set) == 0 || len(n) > 0 && set[n[len(n)-1]]
	}
	for _, t := range parts {
		has := false; for _, x := range t { has = has || kinds[x.concept] }; if !has { t = append(t, kind...) }; var found []map[string]any
		for try := 0; try < 2 && len(found) == 0; try++ {
			var q []string
			for _, x := range t {
				if s := singular[p.r.Language+x.concept]; try == 0 && s != "" && words[x.folded] != nil { q = append(q, s) } else if try == 1 && x.concept != "" {
					q = append(q, english[x.concept])
				} else { q = append(q, written(p.r.Who, x.surface)) }
			}
			if len(parts) > 1 && try == 0 && len(p.all) == 0 && len(kind) > 0 {
				q = []string{singular[p.r.Language+kind[0].concept]} // one question for all parts
			} else if len(parts) > 1 && try == 0 { if found = p.best(t, do, 0.03, keep); len(found) > 0 { break } }
			p.find(strings.Join(q, " "), do); found = p.best(t, do, 0.03, keep)
		}
		out = append(out, found...)
	}
	return out
}

// toolOf gives the fitting tool that came with a device.
func toolOf(d map[string]any, do string, v map[string]any) map[string]any {
	t, _ := d["tool"].(map[string]any); if s, ok := d["tool"].(string); ok { t = map[string]any{"name": s, "input_schema": d["input_schema"]} }
	for _, x := range append([]map[string]any{t}, list(d["tools"])...) { if suits(x, do, v) { return x } }; return t
}
var means = [][]string{{"photo", "picture", "capture", "snapshot", "拍照"}, {"stop", "halt"}, {"brightness", "bright", "亮度"}, {"volume", "音量"}, {"theme", "主题"}}

// suits: the tool's name, description or schema speaks of what is to be done.
func suits(t map[string]any, do string, v map[string]any) bool {
	if len(t) == 0 { return false }; b, _ := json.Marshal(t)
	all, name, want := strings.ToLower(string(b)), " "+strings.Join(tokensOf(str(t, "name")), " ")+" ", " "+strings.ToLower(do)+" "
	for _, m := range means { if strings.Contains(want, m[0]) { for _, w := range m { if strings.Contains(all, w) { return true } }; return false } }
	for _, x := range [][2]string{{" on ", " off "}, {" off ", " on "}} {
		if strings.Contains(want, x[0]) {
			return strings.Contains(name, x[0]) || !strings.Contains(name, x[1]) && regexp.MustCompile(`boolean|"enum"|\b`+strings.TrimSpace(x[0])+`\b`).MatchString(all)
		}
	}
	return true
}
func tokensOf(s string) []string {
	return strings.FieldsFunc(strings.ToLower(s), func(r rune) bool { return !unicode.IsLetter(r) })
}

// arguments fills a tool's schema with the values.
func arguments(t map[string]any, do string, v map[string]any, text string) map[string]any {
	out := map[string]any{}; schema, _ := dig(t, "input_schema").(map[string]any); if schema == nil { schema, _ = dig(t, "inputSchema").(map[string]any) }
	props, _ := dig(schema, "properties").(map[string]any); need := map[string]bool{}; req, _ := schema["required"].([]any); for _, k := range req { need[fmt.Sprint(k)] = true }
	var values []string; for k := range v { if k != "at" && k != "later" && k != "cron" { values = append(values, k) } }
	for k, p := range props {
		prop, _ := p.(map[string]any); options, _ := prop["enum"].([]any); set := any(nil)
		for _, name := range values {
			a, b := fold(k), fold(name); if strings.Contains(a, b) || strings.Contains(b, a) || len(values) == 1 && (len(props) == 1 || need[k] && len(need) == 1) { set = v[name] }
		}
		if set == nil && len(values) == 0 && need[k] {
			on := strings.Contains(" "+do+" ", " on "); if prop["type"] == "boolean" { set = on }
			for _, o := range options { if strings.Contains(" "+do+" ", " "+strings.ToLower(fmt.Sprint(o))+" ") { set = o } }
		}
		if set == nil && need[k] {
			if set = prop["default"]; set == nil && len(options) > 0 { set = options[0] } else if set == nil && prop["type"] == "string" {
				set = text
			} else if set == nil { set = prop["minimum"] }
		}
		for _, o := range options { if strings.EqualFold(fmt.Sprint(o), fmt.Sprint(set)) { set = o } }; if set != nil { out[k] = set }
	}
	return out
}
func names(ds []map[string]any) (out []string) {
	for _, d := range ds { out = append(out, str(d, "name")) }; return out
}

// tool gives the device's fitting tool; it asks the server if none came with it.
func (p *player) tool(d map[string]any) map[string]any {
	t := toolOf(d, p.r.Do, p.r.Values); if suits(t, p.r.Do, p.r.Values) { return t }
	a, _ := p.call("describe_device", map[string]any{"device": str(d, "id", "name"), "query": p.r.Do})
	for _, x := range list(dig(a, "tools")) { if suits(x, p.r.Do, p.r.Values) { return x } }; return nil
}

// job runs a tool later; select is tried dry until it takes exactly the devices.
func (p *player) job(ds []map[string]any, t map[string]any) bool {
	var ids, quoted, labels []string; for _, d := range ds { ids = append(ids, str(d, "id", "name")); quoted = append(quoted, strconv.Quote(str(d, "name"))) }
	l, _ := ds[0]["labels"].(map[string]any); for k, v := range l { labels = append(labels, fmt.Sprintf("%s=%v", k, v)) }; sort.Strings(labels)
	args := map[string]any{"tool": str(t, "name"), "arguments": arguments(t, p.r.Do, p.r.Values, p.r.Text)}
	if s, ok := p.r.Values["later"].(string); ok { if d, err := time.ParseDuration(s); err == nil { args["until"] = time.Now().UTC().Add(d).Format(time.RFC3339) } }
	for _, k := range []string{"at", "cron"} {
		s, _ := p.r.Values[k].(string)
		if clock, err := time.Parse("15:04", s); err == nil && k == "at" {
			now := time.Now().UTC(); at := time.Date(now.Year(), now.Month(), now.Day(), clock.Hour(), clock.Minute(), 0, 0, time.UTC); if !at.After(now) { at = at.AddDate(0, 0, 1) }
			s = at.Format(time.RFC3339)
		}
		if s != "" { args[k] = s }
	}
	tries := []string{"id in (" + strings.Join(ids, ",") + ")", "name in (" + strings.Join(quoted, ",") + ")", strings.Join(labels, ", ")}
	if len(ds) == 1 { tries[0], tries[1] = "id="+ids[0], "name="+quoted[0] }
	for _, s := range tries {
		args["select"], args["dry_run"] = s, true; a, failed := p.call("run_job", args); ok := !failed && s != ""
		for _, k := range []string{"total", "tasks", "selected", "count", "devices"} {
			if n, is := dig(a, k).(float64); is && int(n) != len(ds) { ok = false } else if l, is := dig(a, k).([]any); is && len(l) != len(ds) { ok = false }
		}
		if delete(args, "dry_run"); ok { if _, failed = p.call("run_job", args); !failed { return true } }
	}
	return false
}

// undo calls the tool of the last call again with the values from before.
func (p *player) undo(d map[string]any) string {
	a, _ := p.call("list_recent_events", map[string]any{"device": str(d, "id", "name"), "type": "call", "since": "2h"}); events := list(dig(a, "events"))
	for i := len(events) - 1; i >= 0; i-- {
		tool, args := str(events[i], "tool"), map[string]any{}; if dig(events[i], "error") != nil { continue }; old, _ := dig(events[i], "arguments").(map[string]any)
		before, known := dig(events[i], "before"), len(old) > 0
		for k := range old {
			v := dig(before, k)
			if m, ok := before.(map[string]any); ok && v == nil && len(old) == 1 && len(m) == 1 {
				for _, v = range m {
				}
			}
			for full, x := range flat(before, "") { if v == nil && strings.HasSuffix(full, k) { v = x } }; args[k] = v; known = known && v != nil
		}
		if swap := strings.NewReplacer("turn_on", "turn_off", "turn_off", "turn_on").Replace(tool); len(old) == 0 && swap != tool { tool, known = swap, true }
		if tool != "" && known {
			if _, failed := p.call("call_device_tool", map[string]any{"device": str(d, "id", "name"), "tool": tool, "arguments": args}); !failed { return "It is as it was before." }
			return "That failed. " + p.dead
		}
	}
	return "I do not know what it was before."
}
func flat(v any, at string) map[string]any {
	out := map[string]any{}; m, _ := v.(map[string]any)
	for k, x := range m { if _, deep := x.(map[string]any); !deep { out[at+k] = x }; for k2, y := range flat(x, at+k+".") { out[k2] = y } }; return out
}

// Policy plays a model.
func Policy(h Host, r Request) Said {
	p := &player{h: h, r: r, seen: map[string]bool{}}; do := r.Do; if r.Kind == "status" || r.Kind == "history" || r.Kind == "undo" || r.Kind == "message" { do = "" }
	several := r.Kind == "group" || regexp.MustCompile(`(?i)\b(all|every|alle|allen|toutes|tous|todas|todos)\b|所有|全部`).MatchString(r.Who); var ds []map[string]any
	if several { ds = p.many(do) } else if d := p.one(do); d != nil { ds = append(ds, d) }; if len(ds) == 0 { return Said{Text: "There is no such device. " + p.dead} }
	said, id, failed, a := Said{Devices: names(ds)}, str(ds[0], "id", "name"), false, map[string]any(nil); var ids []string
	for _, d := range ds { ids = append(ids, str(d, "id", "name")) }
	switch r.Kind {
	case "status":
		a, failed = p.call("get_device_status", map[string]any{"device": id})
	case "history":
		a, failed = p.call("list_recent_events", map[string]any{"device": id, "type": "call", "since": "24h"})
	case "undo":
		said.Text = p.undo(ds[0]); return said
	case "message":
		a, failed = p.call("send_message", map[string]any{"devices": ids, "text": fmt.Sprint(r.Values["text"])})
	default:
		later, _ := r.Values["later"].(string); groups, order := map[string][]map[string]any{}, []map[string]any{}
		for _, d := range ds {
			t := toolOf(d, do, r.Values); if !suits(t, do, r.Values) { t = p.tool(d) }
			if k := str(t, "name"); k != "" { if groups[k] == nil { order = append(order, t) }; groups[k] = append(groups[k], d) }
		}
		if len(order) == 0 { said.Text = "It has no tool for that. " + p.dead; return said }
		for _, t := range order {
			args, g := map[string]any{"tool": str(t, "name"), "arguments": arguments(t, do, r.Values, r.Text)}, groups[str(t, "name")]
			if r.Values["at"] != nil || r.Values["cron"] != nil || later != "" && len(ds) > 1 { failed = !p.job(g, t) } else if len(g) > 1 {
				ids = nil; for _, d := range g { ids = append(ids, str(d, "id", "name")) }; args["devices"] = ids; a, failed = p.call("call_many", args)
			} else {
				if args["device"] = str(g[0], "id", "name"); later != "" { args["later"] = later }; a, failed = p.call("call_device_tool", args)
				if code := str(a, "code"); failed && dig(a, "sent") != true && (strings.Contains(code, "argument") || strings.Contains(code, "schema") || strings.Contains(code, "tool")) {
					g[0]["tool"] = nil // the schema is read anew, once
					if t = p.tool(g[0]); t != nil { args["tool"], args["arguments"] = str(t, "name"), arguments(t, do, r.Values, r.Text); a, failed = p.call("call_device_tool", args) }
				}
			}
		}
	}
	b, _ := json.Marshal(a); if said.Text = "Done. " + string(b); failed { said.Text = "That failed. " + p.dead }; return said
}
