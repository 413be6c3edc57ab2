package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

type completionCmd struct {
	Shell string `arg:"" help:"bash, zsh or fish." enum:"bash,zsh,fish"`
}

// Help explains where the script goes.
func (*completionCmd) Help() string {
	return `bash: source <(fleetd completion bash)
zsh:  fleetd completion zsh > "${fpath[1]}/_fleetd"
fish: fleetd completion fish > ~/.config/fish/completions/fleetd.fish`
}

// Run prints the script, which completes commands, flags and the values of flags without a node.
func (cmd *completionCmd) Run(a *app) error {
	parser, err := newParser(commandsFor(nil))
	if err != nil {
		return failed("build the command line: %w", err)
	}
	var out strings.Builder
	write := map[string]func(io.Writer, []completed){"bash": writeBash, "zsh": writeZsh, "fish": writeFish}[cmd.Shell]
	write(&out, completions(parser.Model.Node))
	if _, err := io.WriteString(a.stdout, out.String()); err != nil {
		return failed("write: %w", err)
	}
	return nil
}

// completed is what can follow one command.
type completed struct {
	path     string // its names, apart by blanks; empty: fleetd alone
	commands []word
	flags    []completedFlag
	values   []string // of its arguments
}

// word is a text with its help.
type word struct{ text, help string }

// completedFlag is one flag without its dashes.
type completedFlag struct {
	word
	short  string
	bare   bool     // it takes no value
	values []string // it takes one of these
}

// completions returns what can follow each command that is not hidden, the outer ones first.
func completions(root *kong.Node) []completed {
	var all []completed
	var visit func(path []string, n *kong.Node)
	visit = func(path []string, n *kong.Node) {
		c := completed{path: strings.Join(path, " ")}
		// What the default command takes can follow right here.
		for from := n; from != nil; from = from.DefaultCmd {
			for _, f := range from.Flags {
				if !f.Hidden && !slices.ContainsFunc(c.flags, func(g completedFlag) bool { return g.text == f.Name }) {
					c.flags = append(c.flags, newFlag(f))
				}
			}
			for _, p := range from.Positional {
				c.values = append(c.values, valuesOf(p)...)
			}
		}
		for _, child := range n.Children {
			if !child.Hidden {
				c.commands = append(c.commands, word{child.Name, child.Help})
			}
		}
		if n != root { // every command has --help from the root
			for _, f := range root.Flags {
				c.flags = append(c.flags, newFlag(f))
			}
		}
		all = append(all, c)
		for _, child := range n.Children {
			if !child.Hidden {
				visit(append(slices.Clone(path), child.Name), child)
			}
		}
	}
	visit(nil, root)
	return all
}

func newFlag(f *kong.Flag) completedFlag {
	short := ""
	if f.Short != 0 {
		short = string(f.Short)
	}
	return completedFlag{word{f.Name, f.Help}, short, f.IsBool(), valuesOf(f.Value)}
}

// valuesOf returns what a flag or an argument can be. The tag `values` lists what the server checks, `enum` what the
// command line does.
func valuesOf(v *kong.Value) []string {
	var values []string
	for text := range strings.SplitSeq(v.Tag.Get("values")+","+v.Enum, ",") {
		if text = strings.TrimSpace(text); text != "" {
			values = append(values, text)
		}
	}
	return values
}

// names returns the words without their help, each with a prefix.
func names(words []word, prefix string) (out []string) {
	for _, w := range words {
		out = append(out, prefix+w.text)
	}
	return out
}

// flagNames returns the flags as they are typed; valued selects those that take a value.
func (c *completed) flagNames(valued bool) (out []string) {
	for _, f := range c.flags {
		if valued && f.bare {
			continue
		}
		out = append(out, "--"+f.text)
		if f.short != "" {
			out = append(out, "-"+f.short)
		}
	}
	return out
}

// quoted writes a text for a shell; fish and zsh read it as bash does, but for the quote itself.
func quoted(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }

func quotedList(texts []string) string {
	var out []string
	for _, text := range texts {
		out = append(out, quoted(text))
	}
	return strings.Join(out, " ")
}

const bashHead = `# Completion of fleetd for bash, made by: fleetd completion bash

_fleetd() {
    local line=${COMP_LINE:0:COMP_POINT} cur= at= last= head= values= word colon i n
    local words commands flags valued arguments
    # Not COMP_WORDS, which splits at the colons of values and at =.
    read -ra words <<<"$line"
    n=${#words[@]}
    [[ $line == *[[:space:]] ]] || cur=${words[--n]}
    _fleetd_at ''
    for ((i = 1; i < n; i++)); do
        word=${words[i]}
        if [[ -n $last ]]; then
            last=
            continue
        fi
        case $word in
        -*) [[ " $valued " == *" $word "* ]] && last=$word ;;
        *) [[ " $commands " == *" $word "* ]] && at="${at:+$at }$word" && _fleetd_at "$at" ;;
        esac
    done
    if [[ -z $last && $cur == --*=* ]]; then
        last=${cur%%=*}
        cur=${cur#*=}
    fi
    if [[ -n $last ]]; then
        _fleetd_values "$at $last"
        head=${cur%"${cur##*,}"} # of a list, what is there already
    elif [[ $cur == -* ]]; then
        values=$flags
    else
        values="$commands $arguments"
    fi
    local IFS=$' \n'
    COMPREPLY=($(compgen -P "$head" -W "$values" -- "${cur##*,}"))
    # bash replaces only what follows the last colon.
    colon=${cur%"${cur##*:}"}
    [[ -n $colon && $COMP_WORDBREAKS == *:* ]] && COMPREPLY=("${COMPREPLY[@]#"$colon"}")
    return 0
}

`

func writeBash(w io.Writer, all []completed) {
	fmt.Fprint(w, bashHead, "_fleetd_at() {\n    commands= flags= valued= arguments=\n    case $1 in\n")
	for _, c := range all {
		fmt.Fprintf(w, "    %s)\n        commands=%s\n        flags=%s\n        valued=%s\n        arguments=%s\n        ;;\n", quoted(c.path),
			quoted(strings.Join(names(c.commands, ""), " ")), quoted(strings.Join(c.flagNames(false), " ")), quoted(strings.Join(c.flagNames(true), " ")), quoted(strings.Join(c.values, " ")))
	}
	fmt.Fprint(w, "    esac\n}\n\n_fleetd_values() {\n    case $1 in\n")
	for _, c := range all {
		for _, f := range c.flags {
			if len(f.values) > 0 {
				fmt.Fprintf(w, "    %s) values=%s ;;\n", quoted(c.path+" --"+f.text), quoted(strings.Join(f.values, " ")))
			}
		}
	}
	fmt.Fprint(w, "    esac\n}\n\ncomplete -o default -F _fleetd fleetd\n")
}

const zshHead = `#compdef fleetd
# Completion of fleetd for zsh, made by: fleetd completion zsh

_fleetd() {
    local at= last= word
    local -a commands names flags valued arguments values
    local -i i
    _fleetd_at ''
    for ((i = 2; i < CURRENT; i++)); do
        word=$words[i]
        if [[ -n $last ]]; then
            last=
            continue
        fi
        case $word in
        -*=*) ;;
        -*) ((${valued[(Ie)$word]})) && last=$word ;;
        *) if ((${names[(Ie)$word]})); then
            at="${at:+$at }$word"
            _fleetd_at $at
        fi ;;
        esac
    done
    if [[ -z $last && $PREFIX == --*=* ]]; then
        last=${PREFIX%%=*}
        compset -P '*='
    fi
    if [[ -n $last ]]; then
        _fleetd_values "$at $last"
        compset -P '*,'
        if (($#values)); then
            compadd -a values
        else
            _files
        fi
    elif [[ $PREFIX == -* ]]; then
        _describe -o option flags
    elif (($#commands)); then
        _describe command commands
    elif (($#arguments)); then
        compadd -a arguments
    else
        _files
    fi
}

`

func writeZsh(w io.Writer, all []completed) {
	// A colon separates a word from its help; the first one counts.
	described := func(dashes string, words []word) string {
		var out []string
		for _, x := range words {
			out = append(out, dashes+x.text+":"+x.help)
		}
		return quotedList(out)
	}
	fmt.Fprint(w, zshHead, "_fleetd_at() {\n    commands=() names=() flags=() valued=() arguments=()\n    case $1 in\n")
	for _, c := range all {
		var flags []word
		for _, f := range c.flags {
			flags = append(flags, f.word)
		}
		fmt.Fprintf(w, "    %s)\n        commands=(%s)\n        names=(%s)\n        flags=(%s)\n        valued=(%s)\n        arguments=(%s)\n        ;;\n", quoted(c.path),
			described("", c.commands), quotedList(names(c.commands, "")), described("--", flags), quotedList(c.flagNames(true)), quotedList(c.values))
	}
	fmt.Fprint(w, "    esac\n}\n\n_fleetd_values() {\n    values=()\n    case $1 in\n")
	for _, c := range all {
		for _, f := range c.flags {
			if len(f.values) > 0 {
				fmt.Fprintf(w, "    %s) values=(%s) ;;\n", quoted(c.path+" --"+f.text), quotedList(f.values))
			}
		}
	}
	fmt.Fprint(w, "    esac\n}\n\nif [[ $funcstack[1] == _fleetd ]]; then\n    _fleetd \"$@\"\nelse\n    compdef _fleetd fleetd\nfi\n")
}

const fishHead = `# Completion of fleetd for fish, made by: fleetd completion fish

function __fleetd_at
    set -l at
    set -l last
    set -l words (commandline -opc)
    for word in $words[2..-1]
        if test -n "$last"
            set last
            continue
        end
        switch $word
            case '-*=*'
            case '-*'
                if contains -- "$at $word" $__fleetd_valued
                    set last $word
                end
            case '*'
                set -l next (string trim -- "$at $word")
                if contains -- $next $__fleetd_commands
                    set at $next
                end
        end
    end
    echo "$at"
end

`

func writeFish(w io.Writer, all []completed) {
	var paths, valued []string
	for _, c := range all {
		if c.path != "" {
			paths = append(paths, c.path)
		}
		for _, name := range c.flagNames(true) {
			valued = append(valued, c.path+" "+name)
		}
	}
	fmt.Fprint(w, fishHead, "set -g __fleetd_commands ", quotedList(paths), "\nset -g __fleetd_valued ", quotedList(valued), "\n\n")
	for _, c := range all {
		here := "complete -c fleetd -n " + `"test (__fleetd_at) = '` + c.path + `'"`
		for _, x := range c.commands {
			fmt.Fprintf(w, "%s -f -a %s -d %s\n", here, quoted(x.text), quoted(x.help))
		}
		if len(c.values) > 0 {
			fmt.Fprintf(w, "%s -f -a %s\n", here, quoted(strings.Join(c.values, " ")))
		}
		for _, f := range c.flags {
			fmt.Fprintf(w, "%s -l %s", here, f.text)
			if f.short != "" {
				fmt.Fprintf(w, " -s %s", f.short)
			}
			switch {
			case len(f.values) > 0:
				fmt.Fprintf(w, " -x -a %s", quoted(strings.Join(f.values, " ")))
			case !f.bare:
				fmt.Fprint(w, " -r")
			}
			fmt.Fprintf(w, " -d %s\n", quoted(f.help))
		}
	}
}
