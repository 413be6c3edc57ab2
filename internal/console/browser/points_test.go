package browser

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// points is what the console must do in a browser, and the tests of that. A test of another package has its name in
// front.
var points = []struct{ what, tests string }{
	{"Text of devices and people is shown letter by letter on every page", "TestHostileText TestHostileTextOfPeople"},
	{"Marks of direction, invisible characters and long names leave the layout and the text beside them as they are", "TestHostileText TestHostileTextOfPeople"},
	{"Properties with the names of what objects inherit", "TestHostileText"},
	{"A description that requests a key is in a frame, without links", "TestHostileText"},
	{"Markup, code and styles are blocked; no frames; only pictures are shown as pictures", "TestHostileText TestTampering"},
	{"No, wrong, expired and revoked keys: a dialog, then the same page with what was entered", "TestKeys TestKeyEndsInAForm restapi.TestWrongConsoleCodes"},
	{"A key for some devices and tools sees and counts these alone, and is refused in words", "TestKeys TestKeyEndsInAForm"},
	{"The key is in web storage alone, and after logging out in no tab", "TestKeys TestKeyStaysInItsPlace"},
	{"A one-time link works once, for a minute, on any node", "TestLink credential.TestCode fleettest.TestConsoleAcrossNodes restapi.TestWrongConsoleCodes"},
	{"Without API keys there is no login, and no way in for other sites", "TestWithoutKeys restapi.TestNoToken restapi.TestConsoleWithoutTokens"},
	{"10,000 devices: the table, filters and pages are bounded", "TestLargeFleet"},
	{"A change of a device reaches its row and the counts; rows, focus and selection stay", "TestTableFollows TestAnswerOlderThanItsEvent TestCountsOfAFilter"},
	{"A storm of reconnects: the page stays as large as it was, and is right at the end", "TestLargeFleet"},
	{"Eight tabs share a stream, also without a secure context", "TestTabsShareAStream"},
	{"The page of events is bounded; a pause keeps its rows", "TestEventsAreBounded TestPausedPageTakesAnotherFilter TestLastEvents"},
	{"A slow network, none, and missing events", "TestSlowAndAbsentNetwork TestMissingEventsAndLoading"},
	{"Nodes that stop, start and are killed after a balancer", "TestNodesComeAndGo TestPartsAway"},
	{"Without the database or NATS the page names that, and recovers", "TestPartsAway TestRetriesGrow TestNATSAway"},
	{"A wrong clock of the browser", "TestWrongClock"},
	{"A form sends what the schema of a tool wants", "TestFormTypes TestCallFromAForm"},
	{"Results of each kind", "TestResults TestCallFromAForm"},
	{"A confirmation shows what it is for, ends, and acts once", "TestConfirmation TestCallFromAForm TestCancelDialog"},
	{"Admission by code, and refusal of a copy", "TestAdmission TestAdmissionElsewhere TestCopyIsRefused"},
	{"What changed in the tools of a device", "TestToolHistory TestManyVersions"},
	{"Keys, policy, audit", "TestKeysAndPolicy TestAuditExport TestPolicyTable TestKeysAndAuditInWords"},
	{"Why a device is not well is two clicks from the table", "TestWhy TestWhyOnAPhone TestCauses"},
	{"Plots, and their tables", "TestPlots TestStartsInPlots TestPlotAndMetrics TestPlotsFollowTheScheme"},
	{"Every address opens its page", "TestAddresses TestPagesForPeople"},
	{"The keyboard alone is enough", "TestKeyboard TestKeyboardSkips TestWhyOnAPhone TestConfirmation"},
	{"Names and roles for screen readers; quiet live regions", "TestScreenReader TestPagesForPeople TestLargeFleet"},
	{"A phone, and large text", "TestPagesForPeople TestLargeText TestPhone TestNothingIsCut"},
	{"Dark, light, forced colours, reduced motion, print", "TestAppearance TestPagesForPeople"},
	{"Without JavaScript the page names what is needed", "TestAppearance"},
	{"Go is enough to build and run it", "TestNoBuildStep TestBuiltWithGoAlone console.TestPaths"},
	{"Sizes, hashes, caches, and the setting that leaves it out", "console.TestSizes console.TestVendor console.TestPaths restapi.TestConsole restapi.TestConsoleOff"},
	{"A page of another version offers to load the new one, and loses nothing", "TestOtherVersion"},
}

// Each point names tests that exist.
func TestPoints(t *testing.T) {
	t.Parallel()
	if len(points) != 36 {
		t.Errorf("%d points", len(points))
	}
	used := map[string]bool{}
	for i, point := range points {
		if point.tests == "" {
			t.Errorf("%d: %s: no tests", i+1, point.what)
		}
		for name := range strings.FieldsSeq(point.tests) {
			used[name] = true
		}
	}
	declared := map[string]bool{}
	root := filepath.Join("..", "..", "..", "internal")
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Test") && f.Name.Name != "TestMain" {
				name := f.Name.Name
				if file.Name.Name != "browser" {
					name = strings.TrimSuffix(file.Name.Name, "_test") + "." + name
				}
				declared[name] = true
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for name := range used {
		if !declared[name] {
			t.Errorf("there is no test %s", name)
		}
	}
}

// The tree has nothing that Node would install or build, and what builds and runs fleetd names no tool of Node.
func TestNoBuildStep(t *testing.T) {
	root := filepath.Join("..", "..", "..")
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		switch name := entry.Name(); {
		case name == ".git" || name == "build" || name == "dist" || name == "bin":
			if entry.IsDir() {
				return filepath.SkipDir
			}
		case slices.Contains([]string{"package.json", "package-lock.json", "yarn.lock", "pnpm-lock.yaml", "tsconfig.json", "node_modules"}, name), strings.HasPrefix(name, "vite.config"), strings.HasSuffix(name, ".ts"), strings.HasSuffix(name, ".jsx"):
			t.Errorf("%s belongs to a build with Node", path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	text := string(makefile)
	for _, target := range []string{"build", "demo"} {
		recipe := regexp.MustCompile(`(?m)^` + target + `:.*\n((?:\t.*\n)+)`).FindString(text)
		if recipe == "" {
			t.Fatalf("there is no target %s", target)
		}
		script, err := os.ReadFile(filepath.Join(root, "scripts", target))
		if err != nil {
			t.Fatal(err)
		}
		if tool := regexp.MustCompile(`\b(npm|npx|yarn|pnpm|esbuild|vite|deno|bun)\b|\bnode +[\w./-]+\.m?js\b`).FindString(recipe + string(script)); tool != "" {
			t.Errorf("make %s uses %s", target, tool)
		}
	}
}
