#include "cli/commands.hpp"

int main(int argc, char** argv) { return latte::cli::run_program(argc, argv); }
